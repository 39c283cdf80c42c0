"""The short queries of benchmarks/cloze.jsonl, and their grades. No model is needed: the fills are made up."""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter

import programs
import pytest

from acgpt.query.template import Slot, parse, rendered


@pytest.fixture
def cloze(monkeypatch):
    monkeypatch.syspath_prepend(programs.BENCHMARKS)
    return importlib.import_module("cloze")


@pytest.fixture
def queries(cloze):
    return cloze.read_queries(cloze.QUERIES)


def entry(name):
    return {"id": name, "kind": "fact", "language": "en", "template": "A {{_}}.", "answers": ["dog"], "match": "exact"}


def make(cloze, template="A {{_}} B", answers=("dog",), match="exact", **more):
    return cloze.make_query({**entry("x"), "template": template, "answers": list(answers), "match": match, **more})


def write_fills(path, fills, **more):
    record = {"benchmark": "cloze", "model": "made up", "adapter": None, "fills": fills, **more}
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


# ---- the queries ----------------------------------------------------------------------------------------------------


def test_there_are_sixty_queries_of_many_kinds_languages_and_positions(queries):
    assert len(queries) == len({query.id for query in queries}) == len({query.template for query in queries}) == 60
    kinds = {"fact", "grammar", "quote", "code", "sql", "translation", "dialogue", "arithmetic", "email", "list"}
    assert {query.kind for query in queries} == kinds
    languages = {"python", "javascript", "html", "json", "shell", "sql", "en", "fr", "de", "es", "it"}
    assert {query.language for query in queries} == languages
    positions = Counter(query.position for query in queries)
    assert min(positions[position] for position in ("start", "middle", "end", "several")) >= 4
    assert {len(query.answers) for query in queries} == {1, 2, 3}


def test_about_half_of_the_queries_need_the_future_and_none_of_them_ends_in_its_only_gap(queries):
    needy = [query for query in queries if query.needs_future]
    assert 25 <= len(needy) <= 35
    assert not [query.id for query in needy if query.position == "end"]
    assert all(query.needs_future for query in queries if query.position == "start")  # nothing else can decide them


def test_every_listed_answer_is_accepted_and_every_wrong_one_refused(queries):
    for query in queries:
        if query.match == "regex":
            assert len(query.examples) >= 2 and len(query.wrong) >= 2, query.id
        else:
            for number, answers in enumerate(query.answers):
                for answer in answers:
                    fills = [accepted[0] for accepted in query.answers]
                    fills[number] = f" {answer}\n"
                    assert query.accepts(fills), (query.id, answer)
        assert all(query.accepts([example]) for example in query.examples), query.id
        assert not any(query.accepts([text]) for text in query.wrong), query.id
        assert not query.accepts([""] * len(query.answers)), query.id
        assert not query.accepts(["xyzzy"] * len(query.answers)), query.id


def test_a_blank_of_one_token_has_room_for_an_accepted_answer(queries, smollm2):
    fixed = [query for query in queries if query.tokens]
    assert len(fixed) >= 15
    for query in fixed:
        assert query.tokens.replace("{{_1}}", "{{_}}") == query.template
        (slot,) = [part for part in parse(query.tokens) if isinstance(part, Slot)]
        assert slot.blank == 1
        before, after = query.template.split("{{_}}")
        given = smollm2.tokenize(before.rstrip(" ")) + smollm2.tokenize(after)
        wholes = [smollm2.tokenize(before + answer + after) for answer in query.examples or query.answers[0]]
        assert len(given) + 1 in map(len, wholes), query.id


def test_no_answer_stands_in_the_given_text_next_to_its_gap(queries):
    """A query that names its own answer measures copying; the few that do so are meant."""
    meant = {"weekdays", "letters", "boiling-unit", "python-add", "sql-group", "python-import"}
    for query in queries:
        if query.match == "exact" and query.id not in meant:
            given = rendered(part for part in parse(query.template) if not isinstance(part, Slot)).lower().split()
            single = [a.lower() for answers in query.answers for a in answers if len(a) > 1 and " " not in a]
            assert not set(single) & {word.strip(".,;:\"'") for word in given}, query.id


# ---- grades ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "answer", "right", "wrong"),
    [
        ("exact", "a.b", ["a.b", " a.b\n"], ["axb", "a.b.", "A.b", ""]),
        ("prefix", "6", ["6", "6.", "6\n7 - 1 = 6", " 6 apples"], ["60", "6th", "16", "= 6"]),
        ("prefix", "l'Italie", ["l'Italie.", "l'Italie et\nParis"], ["l'Italien", "Italie"]),
        ("contains", "fire", ["fire", "a fire!", "Look,\nfire"], ["fires", "campfire", "Fire"]),
        ("regex", "(red )?hats?", ["hat", "red hats"], ["a hat", "hat.", "redhat"]),
    ],
)
def test_each_matcher_accepts_what_it_should(cloze, match, answer, right, wrong):
    query = make(cloze, answers=[answer], match=match)
    assert [text for text in right if not query.accepts([text])] == []
    assert [text for text in wrong if query.accepts([text])] == []


def test_case_is_ignored_only_where_the_query_says_so(cloze):
    assert not make(cloze).accepts(["Dog"]) and make(cloze, ignore_case=True).accepts(["DOG"])
    assert make(cloze, answers=["d[a-z]g"], match="regex", ignore_case=True).accepts(["DOG"])


def test_several_gaps_must_all_be_right(cloze):
    query = make(cloze, "{{_}} and {{_}}.", [["cat"], ["dog", "bird"]])
    assert query.position == "several" and query.accepts(["cat", "bird"])
    assert not query.accepts(["bird", "cat"]) and not query.accepts(["cat", ""]) and not query.accepts(["cat"])


def test_ranks_are_those_of_the_first_accepted_fill(cloze):
    queries = [cloze.make_query({**entry(i), "needs_future": i == "b"}) for i in ("a", "b", "c")]
    future = {"a": [["dog"], ["cat"]], "b": [["cat"], ["cow"], [" dog "]], "c": [["cat"]]}
    past = {"a": [["dog"]], "b": [["cat"]], "c": []}
    graded = cloze.grade(queries, {"future": future, "past": past})
    assert [graded[i]["future"]["rank"] for i in "abc"] == [1, 3, None]
    assert graded["b"]["future"]["best"] == ["cat"] and graded["c"]["past"] == {"rank": None, "best": []}
    results = {name: cloze.summary(members) for name, members in cloze.groups(graded).items()}
    everything = results["all"]["future"]
    assert (everything["top_1"]["accepted"], everything["top_5"]["accepted"]) == (1, 2)
    assert everything["mrr"] == pytest.approx((1 + 1 / 3) / 3)
    assert results["future decides"]["queries"] == 1 and results["past is enough"]["queries"] == 2
    assert cloze.comparison(graded) == {"both": 1, "only_future": 0, "only_past": 0, "neither": 2}
    assert "known length" not in results["all"] and "one token" not in results


@pytest.mark.parametrize(("accepted", "total"), [(0, 10), (3, 10), (10, 10), (30, 60)])
def test_the_interval_is_wilsons(cloze, accepted, total):
    """Its bounds are the shares p at which the observed one is 1.96 standard errors of p away."""
    result = cloze.share(accepted, total)
    assert result["percent"] == pytest.approx(100 * accepted / total)
    for bound in result["interval"]:
        p = bound / 100
        distance, error = abs(accepted / total - p), math.sqrt(p * (1 - p) / total)
        assert distance == pytest.approx(1.959964 * error, abs=1e-6)


# ---- the program ----------------------------------------------------------------------------------------------------


def test_saved_fills_are_graded_without_a_model(cloze, queries, tmp_path):
    """Every second query gets a right fill with the future, every fourth one without it."""
    right = {q.id: [[(q.examples or a)[0] for a in q.answers]] for q in queries}
    wrong = {q.id: [["xyzzy"] * len(q.answers)] for q in queries}
    fills = {
        condition: {q.id: (right if i % step == 0 else wrong)[q.id] for i, q in enumerate(queries)}
        for condition, step in (("future", 2), ("past", 4))
    }
    path = write_fills(tmp_path / "fills.json", fills)
    done = programs.program("cloze.py", "--from-fills", path)
    assert done.returncode == 0, done.stderr
    *table, line = done.stdout.splitlines()
    record = json.loads(line)
    assert record["benchmark"] == "cloze" and "--from-fills" in record["command"]
    everything = record["results"]["all"]
    assert everything["queries"] == 60 and everything["future"]["top_1"]["accepted"] == 30
    assert everything["past"]["top_1"]["accepted"] == 15
    assert record["comparison"] == {"both": 15, "only_future": 15, "only_past": 0, "neither": 30}
    assert any("all" in row and "30 (50 %)" in row and "15 (25 %)" in row for row in table)
    some = programs.program("cloze.py", "--from-fills", path, "--kinds", "sql", "code", "--limit", 9)
    assert [name for name in json.loads(some.stdout.splitlines()[-1])["results"]][:2] == ["code", "sql"]


def test_bad_input_is_one_line_and_exit_code_2(tmp_path):
    text = tmp_path / "text.json"
    text.write_text("[1, 2]")
    queries = {
        "json.jsonl": '{"id": ',
        "gap.jsonl": json.dumps({**entry("a"), "template": "no gap"}),
        "match.jsonl": json.dumps({**entry("a"), "match": "near"}),
        "regex.jsonl": json.dumps({**entry("a"), "match": "regex", "answers": ["("]}),
        "key.jsonl": json.dumps({**entry("a"), "unheard_of": 1}),
        "twice.jsonl": "\n".join([json.dumps(entry("a"))] * 2),
        "missing.jsonl": json.dumps({k: v for k, v in entry("a").items() if k != "answers"}),
        "empty.jsonl": "",
    }
    for name, content in queries.items():
        (tmp_path / name).write_text(content)
    few = write_fills(tmp_path / "few.json", {"future": {}})
    for arguments, reason in [
        (["--kinds", "poem"], "no kind 'poem'"),
        (["--limit", 0], "leaves no query"),
        (["--limit", "many"], "invalid int value"),
        (["--from-fills", tmp_path / "absent.json"], "absent.json"),
        (["--from-fills", text], "has no fills"),
        (["--from-fills", few], "no fills of capital-germany"),
        (["--fills", tmp_path / "absent" / "fills.json"], "is not a folder"),
        (["--model", tmp_path / "absent"], "absent"),
        *(
            (["--queries", tmp_path / name], "line 1" if name != "twice.jsonl" else "line 2")
            for name in queries
            if name != "empty.jsonl"
        ),
        (["--queries", tmp_path / "empty.jsonl"], "is empty"),
    ]:
        done = programs.program("cloze.py", *arguments)
        assert done.returncode == 2 and reason in done.stderr, (arguments, done.stderr)
        assert done.stdout == "" and len(done.stderr.splitlines()) == 1, (arguments, done.stderr)
