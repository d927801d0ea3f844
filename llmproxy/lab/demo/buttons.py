"""Buttons for the scenes on the page of the demo's proxy. The proxy prints the key of a pressed button, for the demo.

Only `llmproxy.cli.demo_child` adds these buttons.
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
"""Prefix of the line that the demo's proxy prints for a pressed button. The key of the scene follows."""
SCRIPT = "buttons.js"

_log = structlog.get_logger()


def add(keys: str) -> None:
    """Adds a button for each key to the page of this process."""
    scenes = [scene for scene in SCENES if scene.key in keys]
    paths = {scene.key: scene.path for scene in scenes} | {LEAD: "/admin/scenes/lead"}
    shown = [_button(scene.path, scene.name, scene.seconds, _message(scene)) for scene in scenes]
    lead = _button(paths[LEAD], "play all", 0.0, "The demo plays all scenes in turn")
    tools = f'<div class="tools">Demo: {"".join(shown)}{lead}</div>'
    bar = f'<div class="bar-top" id="scenes" data-key="{ADMIN_KEY}">{tools}</div>'
    index = (files(PACKAGE) / FOLDER / INDEX).read_text().replace("</header>", f"{bar}</header>")
    # Inserted before the page's own script, which uses the key at once.
    index = index.replace("<script", f'<script src="{UI}/{SCRIPT}" type="module"></script>\n<script', 1)
    ADDED[UI] = "GET", partial(_file, index, "text/html")
    ADDED[f"{UI}/{SCRIPT}"] = "GET", partial(_file, (files(__package__) / SCRIPT).read_text(), "text/javascript")
    for key, path in paths.items():
        ADDED[path] = "POST", partial(_press, key)
    for scene in scenes:
        ADDED[f"{scene.path}/began"] = "POST", partial(_began, scene)


def _message(scene: Scene) -> str:
    return scene.message.format(victim="the last replica")


def _button(path: str, name: str, seconds: float, hint: str) -> str:
    return f'<button type="button" data-place="{path}" data-seconds="{seconds:g}" title="{hint}">{name}</button>'


def _file(text: str, content_type: str, _: web.BaseRequest) -> web.Response:
    return web.Response(text=text, content_type=content_type, headers=HEADERS)


def _press(key: str, _: web.BaseRequest) -> web.Response:
    # The log uses the same pipe. Only a single write of whole lines is never interleaved with log lines.
    os.write(sys.stdout.fileno(), f"\n{PRESSED}{key}\n".encode())
    return web.Response(status=204)


def _began(scene: Scene, _: web.BaseRequest) -> web.Response:
    # The page shows log lines as events, and marks them in its plots.
    _log.info("scene", name=scene.name, why=_message(scene))
    return web.Response(status=204)
