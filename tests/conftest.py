"""What all tests share."""

from hypothesis import settings

# A deadline is a wall-clock assertion: on a busy machine it fails what is right.
settings.register_profile("treadle", deadline=None)
settings.load_profile("treadle")
