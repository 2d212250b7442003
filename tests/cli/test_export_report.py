"""`treadle export` and `treadle report`: what a run gives to others."""

import json
from pathlib import Path

from safetensors import safe_open


def test_the_default_is_the_adapter_under_exports(treadle, trained) -> None:
    done = treadle("export", trained, "--json")
    assert done.code == 0
    assert (done.json["path"], done.json["form"], done.json["step"]) == ("exports/tiny", "peft", 2)
    assert {"README.md", "adapter_model.safetensors"} <= set(done.json["files"])
    assert "before" in Path("exports/tiny/README.md").read_text()


def test_a_merged_model_in_the_dtype_asked_for_can_be_sampled(treadle, trained) -> None:
    done = treadle("export", trained, "out", "--form", "merged", "--dtype", "bfloat16")
    assert done.code == 0
    assert "merged" in done.out
    assert done.err == "", "bars of a library are not ours to show"
    with safe_open("out/model.safetensors", framework="np") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert json.loads(Path("out/config.json").read_text())["dtype"] == "bfloat16"


def test_a_directory_that_holds_something_needs_force(treadle, trained) -> None:
    assert treadle("export", trained, "out").code == 0
    done = treadle("export", trained, "out")
    assert done.code == 1
    assert "--force" in done.err
    assert treadle("export", trained, "out", "--force").code == 0


def test_a_run_that_is_not_there_is_a_clear_error(treadle, workspace) -> None:
    for command in (["export", "runs/gone"], ["report", "runs/gone"], ["runs", "why", "runs/gone"]):
        done = treadle(*command)
        assert done.code == 2
        assert "there is no run runs/gone" in done.err
        assert "hint:" in done.err


def test_the_report_is_text_or_a_document_and_a_page(treadle, trained) -> None:
    done = treadle("report", trained, "--html", "report.html")
    assert done.code == 0
    assert "written: report.html" in done.out
    assert Path("report.html").read_text().lstrip().lower().startswith("<!doctype html>")
    tree = treadle("report", trained, "--json").json
    for side in ("before", "after", "gain"):
        assert {"mean", "ci95", "n"} <= set(tree["eval"][side])
