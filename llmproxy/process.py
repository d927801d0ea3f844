"""The serving process, from signals and inherited sockets to the exit code. No request passes through this module."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from contextlib import AsyncExitStack
from functools import partial

import structlog
import uvloop

from llmproxy.app import Proxy, running
from llmproxy.backends.state_file import AUTO, NONE, StateFile, folder_of, log_old_file, state_path
from llmproxy.config import Config, ConfigError, unused_settings
from llmproxy.config.reload import Reread
from llmproxy.lifecycle import GC_THRESHOLDS, early_signals
from llmproxy.lifecycle.descriptors import clients_of_process, open_files_max, raise_limit
from llmproxy.lifecycle.handover import ProcessSignals, ended_before, inherited_drains, notify
from llmproxy.lifecycle.sockets import ListenError, Sockets
from llmproxy.observe import logs

LENT = "backends get their API key for every client: set api_keys or tenants, or host 127.0.0.1"
NO_FILE = "no configuration file was named with --config; flags and environment variables are read only at the start"
"""The hint of the log line when SIGHUP comes and there is no file to read again."""

_log = structlog.get_logger()


def run(config: Config, reread: Reread | None = None) -> int:
    """Serves until SIGTERM or SIGINT, or until a successor serves (SIGUSR2), and then drains. Returns the exit code.

    `reread` reads the configuration again; None if it did not come from a file.
    """
    logs.configure(config.log_format, config.log_level)
    raise_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, reread))


async def _serve(config: Config, reread: Reread | None) -> int:
    try:
        sockets = Sockets.from_environment(os.environ, os.getpid())
        signals = ProcessSignals(sockets)
        path = state_path(config.state_file, os.environ, config.host, config.port)
        if config.state_file == AUTO:
            log_old_file(path)
        state = None if path is None else StateFile(path)
        usage = folder_of(config.usage.dir, path)
        async with AsyncExitStack() as stack:
            begun = running(config, reread, sockets, inherited_drains(os.environ), state, usage)
            start = asyncio.ensure_future(stack.enter_async_context(begun))
            if not await ended_before(signals.over, start):
                # Workers and ports that are open already are closed again.
                await asyncio.gather(start, return_exceptions=True)
                _log.info("stopped", all_requests_finished=True, cut=0)
                return 0
            proxy = start.result()
            # Needed also without a file, because the default action of SIGHUP ends the process.
            reloader = proxy.reloader
            no_file = partial(_log.warning, "nothing_to_reload", hint=NO_FILE)
            sighup = no_file if reloader is None else reloader.reload_on_signal
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, sighup)
            signals.take_restarts(proxy.registry.drained, member=proxy.cluster is not None)
            clients = "those with a key" if config.needs_key() else "anybody (no api_keys, no tenants)"
            admin = proxy.admin_url or proxy.url
            for setting in unused_settings(config):
                _log.warning("setting_without_effect", setting=setting)
            if config.lends_keys():
                _log.warning("no_key_needed", hint=LENT)
            for setting in config.old_names:
                _log.warning("setting_renamed", setting=setting)
            allowed = clients_of_process(config).connections_max * config.workers
            if allowed < config.clients.connections_max:
                # A warning only for a configured limit: most machines allow fewer than the default.
                configured = "connections_max" in config.clients.model_fields_set
                (_log.warning if configured else _log.info)(
                    "connections_limited",
                    connections_max=allowed,
                    **{"configured" if configured else "default": config.clients.connections_max},
                    open_files=open_files_max(),
                    hint="a request takes two open files: allow more with ulimit -Hn, or LimitNOFILE= of systemd",
                )
            _log.info(
                "listening",
                url=proxy.url,
                addresses=sockets.addresses(config.host, config.port),
                admin=admin,
                backends=len(config.backends),
                workers=config.workers,
                clients=clients,
                open_files=open_files_max(),
                state_file=str(path) if path else NONE,
            )
            # Objects of the start live until the end, so the garbage collector can skip them.
            gc.freeze()
            # With 100,000 waiting requests, a full collection would delay decisions by tens of milliseconds.
            gc.set_threshold(*GC_THRESHOLDS)
            notify("READY=1")
            sockets.serving()
            early_signals.send_again()
            await signals.over.wait()
            finished = await _shut_down(proxy, signals)
            # A worker does not report a request before the body of the request has arrived.
            cut = proxy.open_requests or int(not finished)
            _log.info("stopped", all_requests_finished=finished, cut=cut)
    except ConfigError as error:
        for problem in error.problems:
            _log.error("cannot_start", problem=problem)
        return 2
    except ListenError as error:
        _log.error("cannot_listen", host=error.host, port=error.port, hint=error.hint, error=str(error))
        return 1
    except OSError as error:
        _log.error("cannot_start", problem=str(error))
        return 1
    return 0 if finished else signals.cut_code


async def _shut_down(proxy: Proxy, signals: ProcessSignals) -> bool:
    """Drains until all requests have ended, a timeout has passed or a second signal has come.

    Returns whether all requests have ended.
    """
    config = proxy.config
    if signals.successor_pid is not None:
        # Before the log line, so that every request after the line gets `Connection: close`.
        proxy.begin_shutdown(replaced=True)
        _log.info(
            "replaced", by_pid=signals.successor_pid, requests=proxy.open_requests, timeout_s=config.drain_timeout_s
        )
        if await ended_before(signals.stop, proxy.hand_over(), config.drain_timeout_s):
            return True
        if not signals.stop.is_set():
            proxy.leasing.drain()
            return proxy.open_requests == 0
    else:
        notify("STOPPING=1")
        proxy.begin_shutdown()
        if config.drain_delay_s:
            _log.info("leaving", requests=proxy.open_requests, delay_s=config.drain_delay_s)
            await ended_before(signals.cut, asyncio.sleep(config.drain_delay_s))
    _log.info("draining", requests=proxy.open_requests, timeout_s=config.drain_timeout_s)
    drain = asyncio.ensure_future(proxy.drain())
    return drain.result() if await ended_before(signals.cut, drain) else proxy.open_requests == 0
