"""Commands replace what they wrote before, and leave everything else as it is."""

import pytest

from forgetting_transformer.analysis import AnalysisError, outputs


def write(folder, content, command="a command", name="table.md"):
    with outputs.writing(folder, command) as new:
        (new / name).write_text(content)


def test_files_of_others_stay_and_nothing_is_written_beside_them(tmp_path):
    (tmp_path / "b.md").write_text("mine")
    refused = pytest.raises(AnalysisError, match=r"b\.md is not as a command has written it: move it away, or choose")
    with refused, outputs.writing(tmp_path, "a command") as new:
        (new / "a.md").write_text("a")
        (new / "b.md").write_text("b")
    assert [path.name for path in tmp_path.iterdir()] == ["b.md"] and (tmp_path / "b.md").read_text() == "mine"
    with pytest.raises(AnalysisError, match="move it away"):
        outputs.check(tmp_path, "a command", ["b.md"])
    outputs.check(tmp_path, "a command", ["a.md"])


def test_what_was_changed_since_or_is_of_another_command_stays(tmp_path):
    write(tmp_path, "one")
    with pytest.raises(AnalysisError, match="is not as another command has written it"):
        write(tmp_path, "two", "another command")
    (tmp_path / "table.md").write_text("one, and a note of mine")
    with pytest.raises(AnalysisError, match="is not as a command has written it"):
        write(tmp_path, "two")
    (tmp_path / "table.md").unlink()
    for content in ("two", "three"):
        write(tmp_path / "made/for it", content)
    assert (tmp_path / "made/for it/table.md").read_text() == "three"


def test_a_command_that_was_killed_between_its_files_knows_them_at_its_next_start(tmp_path, monkeypatch):
    write(tmp_path, "one")
    with monkeypatch.context() as patched:
        patched.setattr(outputs, "write_atomically", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, "two")
    assert (tmp_path / "table.md").read_text() == "one"
    write(tmp_path, "three")


def test_a_place_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file/x"):
        with pytest.raises(AnalysisError, match=r"cannot write to .*file.* \(.*\); name another folder"):
            write(folder, "one")
    (tmp_path / outputs.LIST).write_text("{")
    with pytest.raises(AnalysisError, match=r"written\.json is damaged; delete it"):
        write(tmp_path, "one")
