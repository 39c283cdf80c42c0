"""A headless Chromium, and a server of a tiny model."""

from __future__ import annotations

import shutil

import pytest
from pages import served
from servers import service_of, tiny_lm


@pytest.fixture(scope="session")
def page_service():
    with service_of(tiny_lm(positions=600)) as service:
        yield service


@pytest.fixture
def address(page_service):
    with served(page_service) as address:
        yield address


@pytest.fixture(scope="session")
def chromium():
    """The browser of the system, or the one that playwright has downloaded."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium):
    """Return a function that opens a page; after the test, none of them may have had an error of its own."""
    contexts, problems = [], []

    def open_page(url, **options):
        context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"], **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on("console", lambda m: problems.append(m.text) if "Content Security Policy" in m.text else None)
        page.goto(url)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture
def page(open_page, address):
    return open_page(address.url)
