"""Buttons for the scenes on the page of the demo's proxy, which prints what was pressed. The demo reads it.

They are added by `llmproxy.cli.demo_child` alone, so no other proxy knows of scenes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib.resources import files

import structlog
from aiohttp import web

from llmproxy.gateway.admin.debug import UI
from llmproxy.gateway.admin.static import FOLDER, HEADERS, INDEX, PACKAGE
from llmproxy.gateway.pages import ADDED
from llmproxy.lab.demo.scenes import ADMIN_KEY, LEAD, SCENES, Scene

PRESSED = "scene:"
"""A line that the proxy of the demo prints begins so, and goes on with the key of the scene."""
SCRIPT = "buttons.js"

_log = structlog.get_logger()


def add(keys: str) -> None:
    """Add a button for each of these keys to the page of this process."""
    scenes = [one for one in SCENES if one.key in keys]
    places = {one.key: one.place for one in scenes} | {LEAD: "/admin/scenes/lead"}
    shown = [_button(one.place, one.name, one.seconds, _news(one)) for one in scenes]
    lead = _button(places[LEAD], "play all", 0.0, "The demo plays all scenes in turn")
    tools = f'<div class="tools">Demo: {"".join(shown)}{lead}</div>'
    bar = f'<div class="bar-top" id="scenes" data-key="{ADMIN_KEY}">{tools}</div>'
    index = (files(PACKAGE) / FOLDER / INDEX).read_text().replace("</header>", f"{bar}</header>")
    # Before the page's own script, which asks with the key at once.
    index = index.replace("<script", f'<script src="{UI}/{SCRIPT}" type="module"></script>\n<script', 1)
    ADDED[UI] = "GET", partial(_file, index, "text/html")
    ADDED[f"{UI}/{SCRIPT}"] = "GET", partial(_file, (files(__package__) / SCRIPT).read_text(), "text/javascript")
    for key, place in places.items():
        ADDED[place] = "POST", partial(_press, key)
    for one in scenes:
        ADDED[f"{one.place}/began"] = "POST", partial(_began, one)


def _news(scene: Scene) -> str:
    return scene.news.format(victim="the last replica")


def _button(place: str, name: str, seconds: float, hint: str) -> str:
    return f'<button type="button" data-place="{place}" data-seconds="{seconds:g}" title="{hint}">{name}</button>'


def _file(text: str, content_type: str, _: web.BaseRequest) -> web.Response:
    return web.Response(text=text, content_type=content_type, headers=HEADERS)


def _press(key: str, _: web.BaseRequest) -> web.Response:
    # The log goes into the same pipe: one write of whole lines is the only one that its lines cannot break in two.
    os.write(sys.stdout.fileno(), f"\n{PRESSED}{key}\n".encode())
    return web.Response(status=204)


def _began(scene: Scene, _: web.BaseRequest) -> web.Response:
    # Lines of the log are the events of the page, and the marks of its plots.
    _log.info("scene", name=scene.name, why=_news(scene))
    return web.Response(status=204)
