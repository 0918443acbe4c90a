"""The template of a machine's fork servers: it imports their code once, and forks a fork server for every request.

The common parent of sandboxes (`parent`) starts it by exec, with a clean environment, because every fork server that starts
by exec takes 80 ms of CPU for its imports. Invariants: it has one thread, holds no credential, and runs no environment's
code. Its supervisors have inherited the other end of the socket FD. A request has three descriptors: the control socket of
the fork server, its output, and its configuration. The forked process answers `begun` on the control socket, with a
descriptor of itself, by which the supervisor learns its end. It exits with the common parent.
"""

import gc
import json
import os
import select
import signal
import socket
import sys
from typing import NoReturn

from marlaas_worker.sandbox import kernel
from marlaas_worker.sandbox.forkserver import serve_configured
from marlaas_worker.sandbox.rehearsal import rehearse

NUM_DESCRIPTORS = 3
PACKET_BYTES = 64


class Template:
    """Forks fork servers by request, and reaps them."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._wake = kernel.wake_on_child()

    def serve(self) -> None:
        """Execute requests until all supervisors and the common parent have ended."""
        watched: list[socket.socket | int] = [self._requests, self._wake]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if self._wake in ready:
                os.read(self._wake, 4096)
                _reap_all()
            if self._requests in ready:
                packet, descriptors = kernel.receive(self._requests, PACKET_BYTES, NUM_DESCRIPTORS)
                if not packet:
                    return
                self._fork(descriptors)

    def _fork(self, descriptors: list[int]) -> None:
        """Fork a fork server. If that fails, the supervisor sees its control socket closed."""
        try:
            pid = os.fork()
        except OSError as error:
            sys.stderr.write(f"the template of fork servers cannot fork: {error.strerror}\n")
        else:
            if pid == 0:
                self._become(*descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    def _become(self, control: int, output: int, configuration: int) -> NoReturn:
        """In the forked process: be a fork server, as if it had been started by exec, and exit."""
        try:
            os.close(signal.set_wakeup_fd(-1))
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._requests.close()
            os.close(self._wake)
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            kernel.be_like_siblings()
            kernel.open_many_files()
            with socket.socket(fileno=control) as connection, os.fdopen(configuration) as file:
                kernel.die_with_connection(connection)
                _answer(connection)
                serve_configured(connection, json.load(file))
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            os._exit(0)


def _answer(connection: socket.socket) -> None:
    """Tell the supervisor the process that was forked for it."""
    own = os.pidfd_open(os.getpid())
    try:
        socket.send_fds(connection, [json.dumps({"report": "begun", "pid": os.getpid()}).encode()], [own])
    finally:
        os.close(own)


def _reap_all() -> None:
    """Reap the fork servers that have exited, and kill what their process groups have left."""
    while (pid := kernel.exited_child()) is not None:
        kernel.kill_group(pid)
        os.waitpid(pid, 0)


def main() -> None:
    """Run the template for the common parent that started this process."""
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        kernel.die_with_parent()
        kernel.hide_from_siblings()
        rehearse()
        gc.collect()
        gc.freeze()
        Template(requests).serve()


if __name__ == "__main__":
    main()
