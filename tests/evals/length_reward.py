"""A reward with some variance on any model; alone in its file, so that a grader's process that
imports it is up at once."""


def by_length(trajectory):
    return {"score": len(trajectory.answer) % 5 / 5, "length": len(trajectory.answer) / 100}
