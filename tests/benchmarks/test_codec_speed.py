"""The codecs' speed: a smoke test, and verdicts."""

import json


def test_every_codec_is_measured_in_every_repetition(b, lines_of, tmp_path, capsys):
    b.codec_speed.main(["--quick", "--record", str(tmp_path), "--quiet"])
    cells = [*map(json.loads, lines_of(tmp_path))]
    names = [name for name in b.codec_speed.CODECS if name != "fp32"]
    assert [cell["codec"] for cell in cells] == 2 * names
    assert all(seconds > 0 for cell in cells for seconds in cell["seconds"].values())
    assert "MB of fp32 values per second on one core (required: 500)" in capsys.readouterr().out


def test_speeds_are_judged_codec_by_codec_by_their_medians(b):
    def cells(encode_s):
        return [{"values": 250_000, "seconds": {"copy": 1e-3, "encode": each, "decode": 4e-3}} for each in encode_s]

    lines, table = b.codec_speed.outcome(
        {"int8": cells([1e-3, 2e-3, 9e-3]), "int4": cells([2.01e-3] * 3), "topk": cells([8e-3] * 3)}
    )
    assert [line.split(":")[0] for line in lines] == ["**holds here**", "**does not hold here**", "**holds here**"]
    assert "int8 encodes 500 MB" in lines[0]
    (row,) = (line for line in table.splitlines() if line.startswith("| int8"))
    assert [cell.strip() for cell in row.split("|")[1:-1]] == ["int8", "500", "2.0", "250", "4.0", "0.252"]
