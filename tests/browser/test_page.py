"""The page of `acgpt serve` in a browser: what it shows, what it keeps, and what it survives."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from urllib.parse import quote

import pytest
from pages import served
from servers import service_of, tiny_lm

from acgpt.errors import TemplateError
from acgpt.query.template import Given, escape, escape_slot, parse

expect = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'acgpt[browser]'").expect
pytestmark = pytest.mark.browser

HOSTILE = """<img src=x onerror="alert(1)"><script>alert(2)</script> & "quoted" '</textarea>'"""


def write(page, text):
    page.locator("#text").fill(text)


def text_of(page):
    return page.locator("#text").input_value()


def select(page, start, end):
    page.locator("#text").focus()
    page.locator("#text").evaluate("(field, [a, b]) => field.setSelectionRange(a, b)", [start, end])


def idle(page):
    """Wait until nothing runs."""
    expect(page.locator("#stop")).to_be_hidden(timeout=60_000)


def start(page, text=None):
    """Write a text, if there is one, and ask; do not wait for the answer."""
    if text is not None:
        write(page, text)
    page.locator("#run").click()


def run(page, text=None):
    start(page, text)
    idle(page)


def view(page, name):
    """Open a tab and wait for what it asks."""
    page.locator(f"#tab-{name}").click()
    idle(page)


def words_of(rows):
    return [re.sub(r": accept.*", "", row.locator("button").text_content()) for row in rows.all()]


def alternatives_of(page):
    return page.get_by_label("Alternatives for the selected words")


# ---- fill -----------------------------------------------------------------------------------------------------------


def test_words_are_blanked_and_filled_and_a_fill_is_accepted_undone_and_redone(page):
    write(page, "The cat sat on the mat.")
    select(page, 3, 8)  # " cat ": white space stays
    page.keyboard.press("Control+b")
    blanked = "The {{_}} sat on the mat."
    assert text_of(page) == blanked
    expect(page.locator("#backdrop mark")).to_have_text("{{_}}")
    page.keyboard.press("Control+Enter")
    rows = page.locator("#fill .column.future li")
    expect(rows.first).to_be_visible(timeout=60_000)
    idle(page)
    assert rows.count() == 5 == page.locator("#fill .column.past li").count()
    expect(rows.first.locator(".measure")).to_have_count(2)
    assert re.search(r"\d+ tokens?", rows.first.inner_text()) and "%" in rows.first.inner_text()
    assert page.locator(".column.future .preview mark").inner_text().strip("\n") != ""
    page.keyboard.press("Alt+2")
    accepted = text_of(page)
    assert accepted.startswith("The ") and accepted.endswith(" sat on the mat.") and "{{" not in accepted
    page.keyboard.press("Control+z")
    assert text_of(page) == blanked
    page.keyboard.press("Control+z")
    assert text_of(page) == "The cat sat on the mat."
    page.keyboard.press("Control+Shift+z")
    page.locator("#redo").click()
    assert text_of(page) == accepted
    expect(page.locator("#redo")).to_be_disabled()


def test_the_word_at_the_caret_is_blanked_without_a_selection(page):
    write(page, "The cat sat.")
    select(page, 5, 5)
    page.locator("#gap").click()
    assert text_of(page) == "The {{_}} sat."


def test_accepting_a_fill_keeps_slots_that_are_not_filled(page):
    run(page, r"C:\\{{?2}} the {{_1}} and {{_2-2}} on {{?3}} \{{ mat.")
    row = page.locator("#fill .column.future li").first
    expect(row.locator(".measure")).to_have_count(2)
    first, second = words_of(row)[0].split(" … ")
    row.locator("button").click()
    parts = parse(text_of(page))
    assert [part.text if isinstance(part, Given) else text_of(page)[part.at :][:6] for part in parts] == [
        "C:\\", "{{?2}}", f" the {first} and {second} on ", "{{?3}}", " {{ mat."
    ]  # fmt: skip


def test_the_longest_gap_stands_above_the_results_and_bounds_them(page):
    limit, asked = page.get_by_label("Longest gap"), []
    page.on("request", lambda r: asked.append(r.post_data_json) if r.url.endswith("/v1/fill") else None)
    run(page, "The {{_}} sat on the mat.")
    limit.fill("2")
    run(page)
    assert limit.bounding_box()["y"] < page.locator("#verdict").bounding_box()["y"]
    assert {body["max_tokens"] for body in asked if "max_tokens" in body} == {8, 2}


def test_fills_stream_in(page, address):
    write(page, "The {{_6}} mat.")
    seen = page.locator(".column.future .preview mark").evaluate_all
    page.locator("#compare").click()  # one column
    page.evaluate(
        """() => { window.lengths = new Set();
        new MutationObserver(() => window.lengths.add(document.querySelector('.preview mark')?.childNodes.length))
          .observe(document.getElementById('fill'), {childList: true, subtree: true}); }"""
    )
    run(page)
    assert seen("marks => marks.length") == 1
    assert len(page.evaluate("() => [...window.lengths].filter(n => n > 0)")) >= 3  # piece after piece


def test_one_switch_shows_past_only_beside_the_future(page):
    run(page, "The {{_1}} sat on the mat.")
    expect(page.locator("#fill .column")).to_have_count(2)
    expect(page.locator("#fill .column.past del")).to_have_text(" sat on the mat.")
    page.keyboard.press("Alt+p")
    idle(page)
    expect(page.locator("#compare")).to_have_attribute("aria-checked", "false")
    expect(page.locator("#fill .column")).to_have_count(1)


def test_past_only_is_not_told_what_follows(page, address):
    bodies = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/v1/fill") else None)
    run(page, "The {{_2}} sat on {{_1}} mat.")
    blind = [body["template"] for body in bodies if not body["future"]]
    assert blind and all(t.endswith("}}") and "mat" not in t for t in blind)
    assert any(body["future"] and "mat" in body["template"] for body in bodies)


@pytest.mark.parametrize("gap", ["{{_1}}", "{{_:[a-z .]+}}"])
def test_fills_are_listed_by_their_exact_probabilities_and_no_more_probable_one_is_left_out(page, page_service, gap):
    bodies = []
    page.on("request", lambda r: bodies.append(r.post_data_json) if r.url.endswith("/v1/fill") else None)
    run(page, f"The {gap} sat on the mat.")
    rows = {kind: page.locator(f"#fill .column.{kind} li") for kind in ("future", "past")}
    listed = {kind: words_of(rows[kind]) for kind in rows}
    words = [*listed["future"], *listed["past"]]
    exact = {}
    for kind in rows:
        queries = ["The {{" + escape_slot(each) + "}} sat on the mat." for each in words]
        scores = page_service.lm.log_prob(queries, future=kind == "future")
        exact[kind] = {word: math.exp(score.log_prob) for word, score in zip(words, scores, strict=True)}
    width = "bars => bars.map((bar) => parseFloat(bar.style.width))"
    for kind, other in (("future", "past"), ("past", "future")):
        own = [exact[kind][word] for word in listed[kind]]
        assert len(own) > 1 and own == sorted(own, reverse=True)
        assert page.locator(f".column.{kind} .preview mark").text_content() == listed[kind][0]
        widths = zip(*(row.locator(".bar").evaluate_all(width) for row in rows[kind].all()), strict=True)
        for read, shown in zip((kind, other), widths, strict=True):
            expected = [max(1, 100 * exact[read][word]) for word in listed[kind]]
            assert shown == pytest.approx(expected, rel=1e-3)
        missing = set(listed[other]) - set(listed[kind])
        assert all(exact[kind][word] <= min(own) for word in missing)
    if ":" in gap:
        assert all("[a-z .]+" in body["template"] for body in bodies)
        one_length = r"\{\{_(\d+)-\1:"
        assert all(re.search(one_length, body["template"]) for body in bodies if "best_of" in body)


def test_the_verdict_is_the_ratio_of_the_exact_probabilities_where_there_is_a_future(page, page_service):
    expect(page.locator("#verdict")).to_be_hidden()
    run(page, "The {{_1}} sat on the mat.")
    best = words_of(page.locator("#fill .column.future li"))[0]
    now, before = (
        math.exp(page_service.lm.log_prob("The {{" + escape_slot(best) + "}} sat on the mat.", future=future).log_prob)
        for future in (True, False)
    )
    times = f"{now / before:.1f}" if now / before < 10 else f"{float(f'{now / before:.2g}'):,.0f}"
    change = f"{times} times as probable" if now > before else "less probable"
    expect(page.locator("#verdict")).to_contain_text(f"What comes after the gap makes “{best}” {change}: ")
    run(page, "The cat sat on {{_1}}")
    expect(page.locator("#verdict")).to_have_text("Nothing comes after the gap, so there is no future to read.")
    page.locator("#compare").click()
    idle(page)
    expect(page.locator("#verdict")).to_be_hidden()


def test_past_only_has_as_many_tokens_as_the_words_beside_it(page):
    """The tokens of a fill may include the text that follows it, which past only must not be asked to write."""
    tokens = [{"text": " library"}, {"text": "."}]
    fill = {"fills": ["library"], "lengths": [2], "tokens": tokens}
    bodies = []

    def answer(route):
        bodies.append(route.request.post_data_json)
        if "stream" not in bodies[-1]:
            return route.abort()
        event = {"text": "library", "slot": 0, "fill": fill}
        return route.fulfill(body=f"data: {json.dumps(event)}\n\n", content_type="text/event-stream")

    page.route("**/v1/fill", answer)
    start(page, "Mia went to the {{_}}. She read.")
    expect(page.locator("#notice")).to_be_visible()
    assert next(body["template"] for body in bodies if not body["future"]) == "Mia went to the {{_1-1}}"
    assert {body["template"] for body in bodies if body.get("n")} >= {"Mia went to the {{_2-2}}. She read."}


def test_results_that_come_in_are_not_called_outdated(page, address):
    run(page, "The {{_1}} mat.")
    write(page, "The cat {{_1}} mat.")
    expect(page.locator("#fill")).to_have_class(re.compile("stale"))
    address.delay = 1.0
    page.locator("#run").click()
    expect(page.locator("#fill")).not_to_have_class(re.compile("stale"))
    expect(page.locator("#fill")).to_have_attribute("aria-busy", "true")
    idle(page)


# ---- surprise -------------------------------------------------------------------------------------------------------


def test_the_heat_map_has_both_ways_of_reading_and_what_was_expected(page, page_service):
    text = "The cat sat on the mat."
    write(page, text)
    page.keyboard.press("Alt+s")
    idle(page)
    lm = page_service.lm
    for kind in ("past", "future"):
        tokens = page.locator(f"#surprise .column.{kind} .token")
        assert "".join(tokens.all_text_contents()) == text
        assert all(re.search(r"heat-[0-3]", t.get_attribute("class")) for t in tokens.all())
        assert all(re.search(r"bits, .*; expected ", t.get_attribute("aria-label")) for t in tokens.all())
    tokens = page.locator("#surprise .column.future .token")
    bits = {
        kind: [
            float(re.search(r"([\d.]+) bits", t.get_attribute("aria-label"))[1])
            for t in page.locator(f"#surprise .column.{kind} .token").all()
        ]
        for kind in ("past", "future")
    }
    gains = [a - b for a, b in zip(bits["past"], bits["future"], strict=True)]
    chosen = [t.get_attribute("aria-selected") for t in tokens.all()].index("true")
    assert gains[chosen] >= max(gains) - 0.2  # rounded to 0.1
    tokens.nth(2).hover()
    expect(page.locator("#expected > div")).to_have_count(2)
    expect(page.locator("#expected > div").first.locator("li")).to_have_count(5)
    query = lm.query("{{" + text + "}}")
    past = -lm.log_prob(query).log_prob / 0.6931471805599453
    future = -sum(lm.log_prob(acgpt_query(query.tokens, 1 + i), future=True).log_prob for i in range(len(query)))
    expect(page.locator("#surprise .column.past h3 .number")).to_have_text(f"{past:.0f} bits")
    expect(page.locator("#surprise .column.future h3 .number")).to_have_text(f"{future / 0.6931471805599453:.0f} bits")
    given = acgpt_query(query.tokens, 3)
    bits = -lm.log_prob(given, future=True).log_prob / 0.6931471805599453
    expect(page.locator("#expected h4").first).to_contain_text(f"{bits:.1f} bits, with the future")
    tokens.nth(2).focus()
    page.keyboard.press("ArrowRight")
    expect(tokens.nth(3)).to_be_focused()
    expect(tokens.nth(3)).to_have_attribute("aria-selected", "true")


def test_a_probability_of_zero_is_not_shown_as_certain(page):
    expected = [{"text": "a", "id": 1, "log_prob": 0.0}, {"text": "b", "id": 2, "log_prob": None}]
    token = {"text": "mat", "id": 7, "position": 1, "log_prob": None, "expected": expected}
    page.route("**/v1/surprise", lambda route: route.fulfill(json={"pieces": ["mat"], "tokens": [token]}))
    write(page, "mat")
    page.keyboard.press("Alt+s")
    idle(page)
    for kind in ("past", "future"):
        label = page.locator(f".column.{kind} .token").get_attribute("aria-label")
        assert label == "mat: ∞ bits, very surprising; expected a 100 %, b ≈ 0 %"
        expect(page.locator(f"#surprise .column.{kind} h3")).to_contain_text("∞ bits")
    assert page.locator("#expected .number").all_inner_texts() == ["100 %", "≈ 0 %"] * 2


def test_white_space_and_controls_of_tokens_can_be_seen(page):
    visible = """async (texts) => {
      const {visible} = await import(new URL("page/parts.js", location.href));
      return texts.map((text) => visible(text, 5)); }"""
    texts = [" a b", "\r\n\n\t", "\x00\x1b", "\xa0", "\u200b\u3000", "\U000e0041", "é 🙂", "\x7f", ""]
    shown = ["␣a␣b", "⏎⏎⇥", "␀␛", "U+00A0", "U+200BU+3000", "U+E0041", "é␣🙂", "U+007F", "#5"]
    assert page.evaluate(visible, texts) == shown


def test_percentages_have_two_digits_that_count(page):
    percent = """async (values) => {
      const {percent} = await import(new URL("page/parts.js", location.href));
      return values.map(percent); }"""
    values = [1, 0.594, 0.0996, 0.0994, 0.0123, 0.00996, 0.0026, 0.00096, 0.00029, 0.000001, 0]
    shown = ["100", "59", "10", "9.9", "1.2", "1.0", "0.26", "0.10", "0.029", "≈ 0", "≈ 0"]
    assert page.evaluate(percent, values) == [f"{each} %" for each in shown]


def acgpt_query(tokens, position):
    from acgpt import Query

    return Query(tokens, [other != position for other in range(1, len(tokens) + 1)])


def test_the_map_stops_when_the_text_changes(page, address):
    write(page, "The cat sat on the mat. " * 8)
    address.delay = 0.3
    page.keyboard.press("Alt+s")
    expect(page.locator("#progress")).to_contain_text("tokens")
    write(page, "The dog.")
    expect(page.locator("#stop")).to_be_hidden()
    page.wait_for_timeout(800)
    asked = len(address.paths)
    page.wait_for_timeout(800)
    assert len(address.paths) == asked


def test_tokens_near_the_middle_of_the_window_are_mapped_first(address, open_page):
    page = open_page(address.url, viewport={"width": 375, "height": 500})
    asked = []
    page.on(
        "request",
        lambda r: asked.append(r.post_data_json["positions"]) if "positions" in (r.post_data or "") else None,
    )
    write(page, "The cat sat on the mat. " * 40)
    address.delay = 0.3
    page.locator("#tab-surprise").click()
    tokens = page.locator(".column.future .token")
    expect(tokens.first).to_have_class(re.compile("heat-"))
    assert min(asked[0]) == 1  # the map is below the window: its beginning is nearest
    tokens.last.scroll_into_view_if_needed()
    page.wait_for_timeout(1000)
    assert min(asked[-1]) > tokens.count() / 2


def test_a_long_text_says_that_the_map_is_limited_and_a_selection_is_mapped(page):
    write(page, "The cat sat on the mat. " * 70)
    page.keyboard.press("Alt+s")
    idle(page)
    assert 400 < page.locator("#surprise .column.past .token").count() < 600
    expect(page.locator("#surprise")).to_contain_text("only texts of up to 400 tokens")
    assert page.locator("#surprise .column.past .heat-0, #surprise .column.past .heat-3").count() > 0
    select(page, 0, 23)
    page.keyboard.press("Control+Enter")
    idle(page)
    assert "".join(page.locator(".column.future .token").all_text_contents()) == "The cat sat on the mat."


# ---- rank and layout ------------------------------------------------------------------------------------------------


def test_alternatives_for_a_selection_are_ranked_with_bars_and_copied(page, page_service):
    write(page, "The cat sat on the mat.")
    page.keyboard.press("Alt+r")
    alternatives_of(page).fill("dog\nbird")
    page.locator("#copy-python").click()
    expect(page.locator("#copied")).to_contain_text("Select the words")
    select(page, 4, 7)
    assert copied(page, "template") == "The {{cat|dog|bird}} sat on the mat."
    asked = run_curl(page)
    run(page)
    rows = page.locator("#rank .column.future li")
    expect(rows).to_have_count(3)
    assert text_of(page) == "The {{cat|dog|bird}} sat on the mat."
    ranking = page_service.lm.rank("The {{cat|dog|bird}} sat on the mat.", future=True)
    names = [alternative.choice[0] for alternative in ranking]
    assert words_of(rows) == names
    widths = [row.locator(".bar").evaluate("bar => parseFloat(bar.style.width)") for row in rows.all()]
    assert widths == pytest.approx([max(1, 100 * a.probability) for a in ranking], rel=1e-3)
    expect(page.locator("#rank .column.past li")).to_have_count(3)
    assert [alternative["choice"][0] for alternative in asked["results"][0]["alternatives"]] == names
    assert run_curl(page) == asked
    assert [line.split(maxsplit=1)[1] for line in run_python(page).splitlines()] == [a.text for a in ranking]
    expect(alternatives_of(page)).to_be_hidden()  # those in the text are ranked
    rows.nth(1).locator("button").click()
    assert text_of(page) == ranking[1].text
    expect(alternatives_of(page)).to_be_visible()


def test_suggestions_are_added_to_what_was_typed(page):
    write(page, "The cat sat on the mat.")
    page.keyboard.press("Alt+r")
    lines = alternatives_of(page)
    lines.fill("dog\nbird")
    select(page, 4, 7)
    page.get_by_role("button", name="Suggest").click()
    idle(page)
    first = lines.input_value().split("\n")
    assert first[:2] == ["dog", "bird"] and len(first) > 2
    lines.fill("\n".join(reversed(first)))
    page.get_by_role("button", name="Suggest").click()
    idle(page)
    again = lines.input_value().split("\n")
    assert again[: len(first)] == first[::-1] and len(set(again)) == len(again)


def test_suggestions_are_those_for_the_selected_words(page):
    """Slots before and after the selection have texts of their own in each fill."""
    page.route("**/v1/fill", lambda route: route.fulfill(json={"results": [[{"fills": ["a", "bird", "", "c"]}]]}))
    write(page, "{{_1}} The cat sat {{?2}} on {{_1}} mat.")
    page.keyboard.press("Alt+r")
    select(page, 11, 14)
    page.get_by_role("button", name="Suggest").click()
    expect(alternatives_of(page)).to_have_value("bird")


def test_the_layout_is_the_one_that_acgpt_show_draws_and_is_copied(page):
    write(page, "The {{cat}} sat on the mat.")
    page.keyboard.press("Alt+l")
    drawings = page.locator("#layout figure")
    expect(drawings).to_have_count(2)
    expect(drawings.first).to_contain_text("copies, then BOS and the text")
    slots = drawings.first.locator("li").count()
    assert drawings.first.locator("rect.reads, rect.unread").count() == slots**2
    expect(drawings.first.locator("text", has_text="→ ␣cat")).to_have_count(1)
    write(page, "The {{dog}} sat on the mat.")  # it follows the text
    expect(drawings.first.locator("text", has_text="→ ␣dog")).to_have_count(1)
    write(page, "The {{cat}} sat {{_}} mat.")
    assert copied(page, "template") == "The {{cat}} sat {{_}} mat."
    layout, printed = run_curl(page), run_python(page)
    tokens = drawings.first.locator("li")
    expect(tokens).to_have_count(len(layout["tokens"]))
    assert [text.split(", ")[1] for text in tokens.all_text_contents()] == layout["roles"]
    given = [id for id, role in zip(layout["ids"], layout["roles"], strict=True) if role == "given"]
    assert "Query(" in printed and all(str(id) in printed for id in given)


# ---- state ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Story", "Email", "Python", "JSON", "Poem"])
def test_an_example_is_run_in_every_view_without_another_click(page, name):
    page.locator("#examples").get_by_role("button", name=name).click()
    expect(page.locator("#fill .column.past li").first).to_be_visible()
    idle(page)
    (gap,) = (part for part in parse(text_of(page)) if not isinstance(part, Given))
    assert gap.gap
    gapped = text_of(page)
    page.locator("#tab-rank").click()
    expect(page.locator("#rank .column.future li")).to_have_count(3)
    (slot,) = (part for part in parse(text_of(page)) if not isinstance(part, Given))
    first = slot.alternatives[0]
    page.locator("#tab-surprise").click()
    expect(page.locator("#surprise .column.future .token").last).to_have_class(re.compile("heat-"))
    assert text_of(page) == gapped.replace("{{_}}", first)
    page.locator("#tab-layout").click()
    expect(page.locator("#layout figure")).to_have_count(2)
    assert text_of(page) == gapped.replace("{{_}}", "{{" + first + "}}")
    page.locator("#tab-fill").click()
    assert text_of(page) == gapped
    expect(page.locator("#fill")).not_to_have_class(re.compile("stale"))
    expect(page.locator("#notice")).to_be_hidden()


def test_a_text_that_is_not_an_example_stays_in_every_view(page):
    page.locator("#text").press("End")
    page.locator("#text").press_sequentially("!")
    text = text_of(page)
    for name in ("surprise", "rank", "layout", "fill"):
        page.locator(f"#tab-{name}").click()
        assert text_of(page) == text


def test_a_reload_keeps_and_a_link_shares_the_state(page, open_page):
    text = "Ünïcode & 100% #{{_}} +\n\tπ 🙂"
    write(page, text)
    page.get_by_label("Longest gap").fill("7")
    page.keyboard.press("Alt+r")
    page.keyboard.press("Alt+p")
    alternatives_of(page).fill("a cat\n100 % & more")
    link = copied(page, "link")
    page.reload()
    for each in (page, open_page(link)):
        assert text_of(each) == text
        expect(each.locator("#tab-rank")).to_have_attribute("aria-selected", "true")
        expect(each.locator("#compare")).to_have_attribute("aria-checked", "false")
        assert alternatives_of(each).input_value() == "a cat\n100 % & more"
        each.keyboard.press("Alt+f")
        assert each.get_by_label("Longest gap").input_value() == "7"


def test_the_skip_link_leads_to_the_text_and_keeps_it(page):
    write(page, "kept {{_}}")
    page.locator("#skip").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#text")).to_be_focused()
    assert text_of(page) == "kept {{_}}"


@pytest.mark.parametrize("fragment", ["", "text", "main", "a=b"])
def test_a_fragment_that_is_no_state_changes_nothing(page, open_page, address, fragment):
    write(page, "kept {{_}}")
    page.evaluate("fragment => { location.hash = fragment; }", fragment)
    page.wait_for_timeout(100)
    assert text_of(page) == "kept {{_}}"
    assert text_of(open_page(f"{address.url}/#{fragment}")).startswith("Every Saturday")


def test_a_link_that_is_opened_in_the_same_tab_brings_its_state(page, address):
    write(page, "mine {{_}}")
    page.wait_for_timeout(500)
    page.goto(f"{address.url}/#text=theirs+%7B%7B_%7D%7D&view=rank&compare=0&longest=9&lines=dog")  # only the fragment
    page.wait_for_timeout(500)
    assert text_of(page) == "theirs {{_}}"
    expect(page.locator("#tab-rank")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#compare")).to_have_attribute("aria-checked", "false")
    assert alternatives_of(page).input_value() == "dog"
    assert "compare=0" in page.url and "longest=9" in page.url
    page.keyboard.press("Control+z")
    assert text_of(page) == "mine {{_}}"
    page.goto(f"{address.url}/#text=theirs&view=rank")
    page.wait_for_timeout(500)
    expect(page.locator("#compare")).to_have_attribute("aria-checked", "true")
    assert alternatives_of(page).input_value() == ""


def test_what_was_typed_just_before_a_reload_is_kept(page, address):
    write(page, "old {{_}}")
    page.wait_for_timeout(500)
    for text in ("new {{_}}", ""):
        write(page, text)
        page.reload()
        assert text_of(page) == text
    write(page, "newest {{_}}")
    page.goto("about:blank")
    page.goto(f"{address.url}/#text=other")  # the state of another address
    assert text_of(page) == "other"


def copied(page, name):
    page.locator(f"#copy-{name}").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    return page.evaluate("() => navigator.clipboard.readText()")


def run_curl(page):
    done = subprocess.run(["bash", "-c", copied(page, "curl")], capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


def run_python(page):
    """What the copied program prints."""
    done = subprocess.run([sys.executable, "-c", copied(page, "python")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def bits_of(log_prob):
    return f"{-log_prob / math.log(2):.1f}"


def test_what_is_copied_runs(page):
    text = 'It\'s "{{_1-2}}" \\ $HOME `x`\nof the mat.'
    write(page, text)
    assert copied(page, "template") == text
    assert "HOME" in run_curl(page)["results"][0][0]["text"]
    assert "$HOME" in run_python(page)


@pytest.mark.parametrize("template", ["The {{_}} sat on the mat.", "The {{_2}} on {{_1-3}} mat {{?1}}."])
def test_the_fills_of_what_is_copied_are_those_of_the_page(page, template):
    write(page, template)
    page.locator("#compare").click()  # two columns also list each other's words
    page.get_by_label("Longest gap").fill("3")
    before = run_curl(page)["results"][0]
    assert len(before) == 5 and all(length <= 3 for fill in before for length in fill["lengths"])
    run(page)
    assert copied(page, "template") == template
    shown = words_of(page.locator("#fill .column.future li"))
    fills = run_curl(page)["results"][0]
    gaps = [0, 1] if "{{_2}}" in template else [0]
    assert {" … ".join(fill["fills"][i] for i in gaps) for fill in fills} == set(shown)
    assert run_python(page) == "".join(f"{fill['log_prob']} {fill['text']}\n" for fill in fills)


@pytest.mark.parametrize("part", [None, (4, 15)])
def test_the_bits_of_what_is_copied_are_those_of_the_page(page, part):
    text = "The cat sat on the {mat}."
    write(page, text)
    if part:
        select(page, *part)
    view(page, "surprise")
    labels = {
        kind: [each.get_attribute("aria-label") for each in page.locator(f"#surprise .column.{kind} .token").all()]
        for kind in ("past", "future")
    }
    shown = {kind: [re.search(r": (\S+) bits", label)[1] for label in labels[kind]] for kind in labels}
    reply = run_curl(page)
    assert reply["future"] and "".join(reply["pieces"]) == (text[slice(*part)] if part else text)
    assert [bits_of(token["log_prob"]) for token in reply["tokens"]] == shown["future"]
    assert len(reply["tokens"][0]["expected"]) == 5
    printed = [line.split(maxsplit=2) for line in run_python(page).splitlines()]
    assert [bits_of(float(past)) for past, _, _ in printed] == shown["past"]
    assert [bits_of(float(future)) for _, future, _ in printed] == shown["future"]


def test_a_text_without_a_question_is_copied_as_it_is(page):
    write(page, "No gap here.")
    assert copied(page, "template") == "No gap here."
    page.locator("#copy-curl").click()
    expect(page.locator("#copied")).to_contain_text("There is no gap to fill")


TEMPLATES = [
    "a {{_}} b", "{{_3-12}}", r"{{_:\d{4}}}", "{{_4}}{{?3}}", r"\{{ no }} {{a\|b|c}}", r"C:\\{{Users}}",
    r"\frac{{{1}}}{2}", "{{{{x}}", r"{{\{x\}}}", r"{{\_4}} \\\{{", "{{}}", "{{|}}", "{{a {{b}}", "{{_x}}", "{{?}}",
    "{{a", "}} {{a|}} {", "", "\\" * 3 + "{{a}}", "{{{a}}}", "a\\", "{{_1:a|b}}", "{{_:}}",
]  # fmt: skip


def test_templates_are_read_as_python_reads_them(page):
    """The page's parser, escapes and writer against those of the library."""
    read = """async (templates) => {
      const {parse, write, escape, escapeSlot} = await import(new URL("page/template.js", location.href));
      return templates.map((t) => { const parts = parse(t); return [parts, parts && write(parts), escape(t),
        escape(t, true), escapeSlot(t)]; }); }"""
    for template, (parts, written, *escaped) in zip(TEMPLATES, page.evaluate(read, TEMPLATES), strict=True):
        try:
            expected = parse(template)
        except TemplateError:
            if parts is not None:  # numbers that are out of range are left to the server
                assert re.search(r"\d", template)
            continue
        assert parts is not None, template
        assert [p.get("text") or [p["start"], p.get("alternatives", [])] for p in parts] == [
            e.text if isinstance(e, Given) else [e.at, list(e.alternatives)] for e in expected
        ]
        for part, e in zip(parts, expected, strict=True):
            if not isinstance(e, Given):
                kind = "gap" if e.gap else "blank" if e.blank else "unknown" if e.unknown else None
                assert part["kind"] == (kind or ("alternatives" if len(e.alternatives) > 1 else "text"))
        again = parse(written)
        assert [p.text if isinstance(p, Given) else p.alternatives for p in again] == [
            p.text if isinstance(p, Given) else p.alternatives for p in expected
        ]
        assert escaped == [escape(template), escape(template, True), escape_slot(template)]


# ---- what may go wrong ----------------------------------------------------------------------------------------------


def test_a_hostile_text_is_only_text(page):
    run(page, HOSTILE + " {{_1}} " + HOSTILE)
    page.locator("#fill .column.future li button").first.click()
    for name in ("surprise", "rank"):
        view(page, name)
    write(page, HOSTILE + "{{" + escape_slot(HOSTILE) + "|<b>x</b>}}")
    expect(page.locator("#rank .column.future li")).to_have_count(2)
    view(page, "layout")
    write(page, "{{" + HOSTILE)  # the error quotes it
    page.locator("#tab-fill").click()
    run(page)
    expect(page.locator("#notice")).to_contain_text("this slot is never closed", ignore_case=True)
    expect(page.locator("#notice pre")).to_contain_text("<img src=x")
    assert page.locator("main img, main script, main b").count() == 0


def test_errors_are_shown_in_words_and_nothing_is_lost(page):
    run(page, "No gap here.")
    expect(page.locator("#notice")).to_contain_text("There is no gap to fill")
    run(page, "cat " * 700 + "{{_}}")
    expect(page.locator("#notice")).to_contain_text("tokens")
    assert text_of(page) == "cat " * 700 + "{{_}}"
    write(page, "")
    expect(page.locator("#notice")).to_be_hidden()


def test_an_error_takes_the_results_of_another_text_away(page):
    run(page, "The {{_1}} mat.")
    columns = page.locator("#fill .columns")
    expect(columns).to_be_visible()
    run(page, "No gap here.")
    expect(page.locator("#notice")).to_be_visible()
    for gone in (columns, page.locator("#verdict")):
        expect(gone).to_be_hidden()
    write(page, "The {{_1}} mat.")  # the text that they are of
    expect(columns).to_be_visible()
    run(page, "{{")
    expect(columns).to_be_hidden()
    page.locator("#tab-rank").click()  # where nothing has failed
    expect(page.locator("#notice")).to_be_hidden()


def test_a_slow_server_shows_progress_can_be_stopped_and_answers_in_the_end(page, address):
    address.delay = 2.5
    start(page, "The {{_1}} mat.")
    expect(page.locator("#progress")).to_contain_text("s …")
    expect(page.locator("#fill")).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(page.locator("#stop")).to_be_hidden()
    expect(page.locator("#notice")).to_be_hidden()
    page.locator("#run").click()
    page.locator("#text").press_sequentially("!")  # typing goes on, and stops the question
    expect(page.locator("#stop")).to_be_hidden()
    address.delay = 1.0
    run(page)
    expect(page.locator("#fill .column.future li").first).to_be_visible()


def test_a_server_that_dies_and_comes_back_answers_by_itself(page, address):
    write(page, "The {{_1}} mat.")
    address.stop()
    page.locator("#run").click()
    expect(page.locator("#notice")).to_contain_text("The server does not answer")
    expect(page.locator("#notice")).to_contain_text("Your text is kept")
    start(page, "The {{_2}} mat.")
    expect(page.locator("#notice")).to_be_visible()
    address.start()
    expect(page.locator("#fill .column.past li").first).to_be_visible(timeout=30_000)
    expect(page.locator("#notice")).to_be_hidden()
    assert text_of(page) == "The {{_2}} mat."


def test_a_server_that_dies_in_the_middle_is_asked_again(page, address):
    write(page, "The cat sat on the mat. " * 6)
    address.delay = 0.3
    page.keyboard.press("Alt+s")
    expect(page.locator("#progress")).to_contain_text("of")
    address.stop()
    expect(page.locator("#notice")).to_contain_text("Your text is kept")
    address.delay = 0.0
    address.start()
    expect(page.locator("#notice")).to_be_hidden(timeout=30_000)
    idle(page)
    assert page.locator(".column.future .token:not([class*=heat-])").count() == 0


def refusal(status, code=None):
    """An answer that is an error; a page of a proxy, if there is no code."""
    error = {"error": {"message": "the server has run out of memory.", "type": "server_error", "code": code}}
    body = {"json": error} if code else {"body": "<h1>Bad gateway</h1>", "content_type": "text/html"}
    return {"status": status} | body


NOT_READY = [refusal(503, "loading"), refusal(503, "shutting_down"), refusal(503), refusal(502)]
CUT = ["", 'data: {"text": "cat", "slot": 0, "fill": null}\n\ndata: {"te']


@pytest.mark.parametrize(
    ("reply", "words"),
    [(reply, "the page asks again until the server is back") for reply in NOT_READY]
    + [({"body": body, "content_type": "text/event-stream"}, "The server has stopped answering.") for body in CUT],
)
def test_a_server_that_is_not_ready_or_breaks_a_stream_off_is_asked_again(page, reply, words):
    page.route("**/v1/fill", lambda route: route.fulfill(**reply))
    start(page, "The {{_1}} mat.")
    expect(page.locator("#notice")).to_contain_text(words)
    expect(page.locator("#notice")).to_contain_text("Your text is kept")
    page.unroute("**/v1/fill")
    expect(page.locator("#fill .column.past li").first).to_be_visible()
    expect(page.locator("#notice")).to_be_hidden()


def test_an_error_that_stays_is_shown_and_not_asked_again(page):
    asked, reply = [], refusal(503, "out_of_memory")
    page.route("**/v1/fill", lambda route: (asked.append(route.request), route.fulfill(**reply)))
    run(page, "The {{_1}} mat.")
    expect(page.locator("#notice")).to_contain_text("The server has run out of memory.")
    expect(page.locator("#notice")).not_to_contain_text("asks again")
    page.wait_for_timeout(1500)
    assert len(asked) == 1
    page.unroute("**/v1/fill")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("#fill .column.past li").first).to_be_visible()


def test_a_key_is_asked_for_and_kept_for_the_tab_only(page_service, open_page):
    with served(page_service, keys=["secret"]) as address:
        page = open_page(address.url)
        expect(page.get_by_role("dialog")).to_contain_text("wants an API key")
        page.locator("#key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_contain_text("does not accept this key")
        page.locator("#key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#model")).to_contain_text("reads the future")
        run(page, "The {{_1}} mat.")
        expect(page.locator("#fill .column.future li").first).to_be_visible()
        stored = page.evaluate("() => [JSON.stringify(localStorage), document.cookie, location.href]")
        assert not any("secret" in each for each in stored)
        assert "secret" not in copied(page, "curl") + copied(page, "python")
        page.reload()
        expect(page.locator("#model")).to_contain_text("reads the future")
        tab = page.context.new_page()
        tab.goto(address.url)
        expect(tab.get_by_role("dialog")).to_be_visible()
        tab.get_by_role("button", name="Cancel").click()
        start(tab, "kept {{_1}}")
        tab.get_by_role("button", name="Cancel").click()
        expect(tab.locator("#notice")).to_contain_text("Without an API key")
        assert text_of(tab) == "kept {{_1}}"


@pytest.mark.parametrize("name", ["fill", "surprise"])
def test_a_key_that_is_given_later_is_enough(page_service, open_page, name):
    with served(page_service, keys=["secret"]) as address:
        page = open_page(address.url)
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("#model")).to_have_text("no answer about the model")
        write(page, "The {{_1}} mat." if name == "fill" else "The mat.")
        page.locator(f"#tab-{name}").click()
        if name == "fill":
            page.locator("#run").click()
        page.locator("#key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#model")).to_contain_text("reads the future")
        idle(page)
        page.locator("#tab-fill").click()
        write(page, "The mat.")
        view(page, "surprise")
        expect(page.locator("#expected > div").first.locator("li")).to_have_count(5)


def test_twenty_thousand_characters_are_edited_shared_and_refused_in_words(page, open_page):
    text = ("The cat sat on the mat, and the dog sat on the bird. " * 400)[:20_000]
    write(page, text)
    select(page, 10_000, 10_003)
    began = page.evaluate("() => performance.now()")
    page.keyboard.press("Control+b")
    expect(page.locator("#backdrop mark")).to_have_count(1)
    assert page.evaluate("() => performance.now()") - began < 2000
    blanked = text_of(page)
    assert len(blanked) == 20_000 - 3 + 5
    run(page)
    expect(page.locator("#notice")).to_contain_text("model's 600 positions")
    page.locator("#tab-layout").click()  # what is far from the gap is left out
    idle(page)
    expect(page.locator("#layout")).to_contain_text("left out")
    expect(page.locator("#layout figure")).to_have_count(2)
    assert text_of(page) == blanked
    link = copied(page, "link")
    assert text_of(open_page(link)) == blanked


def test_a_model_without_the_future_says_so(open_page):
    from acgpt import LanguageModel

    lm = tiny_lm()
    with service_of(LanguageModel(lm.model, lm.tokenizer)) as service, served(service) as address:
        page = open_page(address.url)
        expect(page.locator("#model")).to_contain_text("was not trained to read the future")


# ---- everybody ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 375])
def test_axe_finds_no_accessibility_error(address, open_page, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.base", reason="needs axe-playwright-python").AXE_SCRIPT
    page = open_page(
        f"{address.url}/#text={quote('The {{_1}} sat on the mat.')}",
        color_scheme=scheme,
        viewport={"width": width, "height": 800},
        bypass_csp=True,
    )

    def check(what):
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), f"{what}: too wide"
        page.evaluate(axe)
        found = page.evaluate("() => axe.run()")
        problems = [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found["violations"]]
        assert not problems, f"{what}: {problems}"

    check("at the start")
    run(page)
    check("fill")
    page.locator("#fill .column.future li button").first.click()
    check("stale")
    view(page, "surprise")
    check("surprise")
    write(page, "The {{cat|dog}} sat.")
    page.locator("#tab-rank").click()
    run(page)
    check("rank")
    view(page, "layout")
    check("layout")
    run(page, "{{")
    check("error")
    page.locator("#help").click()
    check("help")


def test_the_keyboard_is_enough_and_the_focus_follows_the_page(page):
    expected = ["Skip to the text", "Theme", "Shortcuts", "Story", "Email", "Python", "JSON", "Poem"]
    for name in expected:
        page.keyboard.press("Tab")
        assert page.evaluate("() => document.activeElement.textContent").strip().startswith(name)
    page.keyboard.press("Tab")
    expect(page.locator("#text")).to_be_focused()
    page.locator("#tab-fill").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tab-surprise")).to_be_focused()
    page.keyboard.press("Alt+h")
    expect(page.get_by_role("dialog")).to_contain_text("accept this fill")
    page.keyboard.press("Escape")
    expect(page.locator("#help-dialog")).to_be_hidden()


def test_states_are_announced_in_browsers_that_have_no_aria_properties(page):
    names = "Object.getOwnPropertyNames(Element.prototype).filter((name) => name.startsWith('aria'))"
    page.add_init_script(f"for (const name of {names}) delete Element.prototype[name]")
    page.reload()
    write(page, "The cat sat.")
    page.keyboard.press("Alt+s")
    idle(page)
    expect(page.locator("#tab-surprise")).to_have_attribute("aria-selected", "true")
    expect(page.locator("#tab-fill")).to_have_attribute("aria-selected", "false")
    expect(page.locator("#surprise .column")).to_have_count(2)
    for column in page.locator("#surprise .column").all():
        expect(column.locator(".token[aria-selected=true]")).to_have_count(1)
        expect(column.locator(".token").first).to_have_attribute("aria-label", re.compile("bits"))
    page.keyboard.press("Alt+p")
    idle(page)
    expect(page.locator("#compare")).to_have_attribute("aria-checked", "false")
    expect(page.locator("#surprise .column")).to_have_count(1)


KEYBOARDS = {  # the places of the keys Z and Y, and the characters that they type
    "QWERTY": {"undo": ("z", "KeyZ"), "redo": ("y", "KeyY")},
    "QWERTZ": {"undo": ("z", "KeyY"), "redo": ("y", "KeyZ")},
    "AZERTY": {"undo": ("z", "KeyW"), "redo": ("y", "KeyY")},
    "ЙЦУКЕН": {"undo": ("я", "KeyZ"), "redo": ("н", "KeyY")},
}


@pytest.mark.parametrize("keyboard", KEYBOARDS)
def test_shortcuts_are_the_letters_on_the_keys(page, keyboard):
    press = """(field, [key, code, shiftKey]) => field.dispatchEvent(new KeyboardEvent("keydown",
        {key: shiftKey ? key.toUpperCase() : key, code, shiftKey, ctrlKey: true, bubbles: true, cancelable: true}))"""
    write(page, "one")
    page.locator("#gap").click()
    undo, redo = (KEYBOARDS[keyboard][name] for name in ("undo", "redo"))
    for key, shift, text in [(undo, False, "one"), (redo, False, "{{_}}"), (undo, False, "one"), (undo, True, "{{_}}")]:
        page.locator("#text").evaluate(press, [*key, shift])
        assert text_of(page) == text, (key, shift)


def test_the_theme_is_chosen_and_kept(page):
    def background():
        return page.evaluate("() => getComputedStyle(document.body).backgroundColor")

    light = background()
    page.locator("#theme").click()
    assert background() == light
    page.locator("#theme").click()
    assert background() != light
    page.reload()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    assert background() != light


def test_the_page_asks_no_other_host(page, address):
    hosts = []
    page.on("request", lambda request: hosts.append(request.url))
    page.reload()
    run(page, "The {{_1}} mat.")
    assert hosts and all(url.startswith(address.url) for url in hosts)
