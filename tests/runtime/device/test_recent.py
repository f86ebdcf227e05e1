from __future__ import annotations

from sglite.runtime.device.cuda.recent import Recent


def test_what_was_not_asked_for_the_longest_makes_room() -> None:
    kept: Recent[str, int] = Recent(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    assert "b" in kept, "looking is not asking"
    kept.put("c", 3)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, None, 3)
    kept.put("a", 4)
    kept.put("d", 5)
    assert (len(kept), kept.get("a"), kept.get("c")) == (2, 4, None)
    kept.clear()
    assert (len(kept), kept.get("a")) == (0, None)
