"""The picture of a load: a box for each span of a request, and names that are escaped."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from bench.load_picture import drawn


def test_a_picture_has_a_box_for_each_span_and_names_are_escaped() -> None:
    spread = {"p50": 0.1, "p95": 0.2, "max": 0.4}
    summary = {"model": "<m>", "clients": 2, "requests": 2, "seconds": 2.0, "prefill_per_second": 1.0, "decode_per_second": 1.0}
    requests = [
        {"client": 0, "start": 0.0, "first": 1.0, "end": 2.0, "error": None},
        {"client": 1, "start": 0.0, "first": None, "end": 0.5, "error": "no"},
    ]
    picture = drawn(summary | {"errors": {"no": 1}, "first_token": spread, "gap": None}, requests)
    boxes = [box.attrib for box in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect")]
    lanes = [box for box in boxes if box.get("height") == "14.0"]

    assert "&lt;m&gt;: 2 requests" in picture
    assert [(box["x"], box["width"]) for box in lanes] == [("80.0", "430.0"), ("510.0", "430.0"), ("80.0", "215.0")]
    assert len({box["fill"] for box in lanes}) == 3
    assert [box["width"] for box in boxes if box.get("height") == "13"] == ["192.5", "385.0", "770.0"]
