"""What the tests of the page do in a browser."""

import os


def opened(browser, server, width=1440, height=900, scheme="dark"):
    """A page that is connected, and what went wrong in it: errors, and what it asked of others."""
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda r: r.url.startswith(server.url) or page.problems.append(r.url))
    page.goto(f"{server.url}/inspect")
    page.wait_for_function("document.getElementById('status').textContent === 'connected'")
    return page


def picture(page, name):
    """A screenshot, where BLOCKTABLE_PICTURES names a folder for them."""
    folder = os.environ.get("BLOCKTABLE_PICTURES")
    if folder:
        page.wait_for_timeout(600)
        page.screenshot(path=f"{folder}/{name}.png")


def shows(page, element, text):
    """Wait until an element shows a text; the page says that it is connected before it draws."""
    page.wait_for_function(
        "([id, text]) => document.getElementById(id).textContent.includes(text)",
        arg=[element, text],
    )
