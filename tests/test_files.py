"""Files that people write: what is broken in them is one line with file, line and column."""

import os
import re

import pytest

from forgetting_transformer import files


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"seed: 1\n\tx: 2\n", "line 2, column 1: .*'\\\\t' that cannot start any token"),
        (b"a: !!python/object/apply:os.system [ls]\n", "line 1, column 4: .*python/object/apply:os.system"),
        (b"a: 1\nb: \0\n", "line 2, column 4: not valid YAML: special characters are not allowed"),
        ("a: 1\nü: é\n".encode("latin-1"), "line 2, column 1: the byte 0xfc is not UTF-8; save the file as UTF-8"),
        (b"a: 2020-13-45\n", "not valid YAML: ValueError: month must be in 1..12"),
    ],
)
def test_a_broken_yaml_is_one_line_with_its_place(content, said, tmp_path):
    (tmp_path / "a.yaml").write_bytes(content)
    with pytest.raises(files.UnreadableError, match=f"^{re.escape(str(tmp_path))}/a.yaml[,:]? ?{said}") as error:
        files.read_yaml(tmp_path / "a.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1,\n "b": }\n', "line 2, column 7: not valid JSON: Expecting value"),
        (b'{\n"\xe9": 1}', "line 2, column 2: the byte 0xe9 is not UTF-8"),
        (b"[" * 100_000, "line 1, column 1: not valid JSON: "),
    ],
)
def test_a_broken_json_is_one_line_with_its_place(content, said, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(files.UnreadableError, match=f"^{re.escape(str(tmp_path))}/a.json[,:]? ?{said}"):
        files.read_json(tmp_path / "a.json")


def test_a_broken_line_of_json_lines_is_named_by_its_number():
    with pytest.raises(files.UnreadableError, match=r"^a\.jsonl, line 3, column 2: not valid JSON: "):
        list(files.parse_json_lines(b'{"a": "\xe2\x80\xa8"}\r\n\n{x\n', "a.jsonl"))


def test_what_cannot_be_replaced_is_named_and_not_a_temporary_file(tmp_path):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "a", tmp_path / "absent/a"):
        with pytest.raises(OSError) as error:
            files.write_json(path, 1)
        assert files.explain(error.value).startswith(f"{path}: ")


def test_a_byte_order_mark_is_no_fault(tmp_path):
    (tmp_path / "a").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert files.read_yaml(tmp_path / "a") == files.read_json(tmp_path / "a") == {"a": 1}


def test_a_name_that_is_not_utf_8_can_be_written_and_read(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    files.write_json(tmp_path / name, {"name": name})
    assert files.read_json(tmp_path / name) == {"name": name}
