"""Values that were asked for last are kept, within a number and a size."""

from jpaged.kept_newest import KeptNewest


def test_those_that_were_asked_for_least_recently_go_by_number_and_by_size():
    kept = KeptNewest[str](3, 10)
    for key in "abc":
        kept.put(key, key.upper(), 2)
    assert kept.get("a") == "A"
    kept.put("d", "D", 2)
    assert [kept.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    kept.put("e", "E", 8)
    assert [kept.get(key) for key in "acde"] == [None, None, "D", "E"]
    kept.put("f", "F", 11)
    assert [kept.get(key) for key in "def"] == [None, None, None], "it is above the bound alone"
