"""Start commands by forking a process that has imported torch and transformers already (Linux).

These imports take longer than many commands. A server imports them once and then forks for every command:

    CommandServer ──socket──► server: imports, waits, forks ──► command
    (the client)  ◄── ready, process id, exit code ──┘          its own process group, output and memory

The server computes nothing and touches no GPU. A command therefore starts from the state of a new process that has
finished its imports: no command can change the result of a later one, its memory is freed when it ends, and a crash
ends that command alone.

Only the standard library is used here; `acgpt.cli.preloaded` is the server's program.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

SUPPORTED = sys.platform == "linux"  # elsewhere a fork is not safe, or does not exist
READY = b"ready"
LARGEST = 2**16  # maximum number of bytes of a message
DESCRIPTORS = 8  # maximum number of descriptors that come with a command


# ---- the client -----------------------------------------------------------------------------------------------------


class CommandServer:
    """A server process, and the connection to it.

    Args:
        program: Command line of the server; the file descriptor of its end of the connection is appended.
        env: Environment of the server and of its commands.
    """

    def __init__(self, program: Sequence[str], env: Mapping[str, str]) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.is_ready = False
        with theirs:
            # In a new session, Ctrl-C in the terminal reaches only the client.
            self.process = subprocess.Popen(
                [*program, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, env=env, start_new_session=True, pass_fds=(theirs.fileno(),),
            )  # fmt: skip

    def ready(self, timeout: float) -> bool:
        """Return whether the imports are done; wait up to `timeout` seconds for them.

        Raises:
            OSError: The server has ended.
        """
        if not self.is_ready and arrived(self.connection, timeout):
            if self.connection.recv(LARGEST) != READY:
                raise ConnectionError("the server has ended.")
            self.is_ready = True
        return self.is_ready

    def start(self, arguments: Sequence[str], *descriptors: int) -> ServedCommand:
        """Fork a process for a command. The server must be ready, and must not be running another command.

        Args:
            arguments: Arguments of the command.
            descriptors: File descriptors for the command. The first becomes its standard output and standard error; the
                others stay open until it ends.

        Raises:
            OSError: The command was not started.
        """
        request = json.dumps(arguments).encode()
        if len(request) > LARGEST:
            raise OSError(f"a command of {len(request):,} bytes is too long for the server.")
        socket.send_fds(self.connection, [request], descriptors)
        message = self.connection.recv(LARGEST)
        if not message:
            raise ConnectionError("the server has ended.")
        return ServedCommand(self.connection, int(message))

    def close(self) -> None:
        """End the server. A running command is not affected."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


class ServedCommand:
    """A running command, with the part of `subprocess.Popen` that a runner needs.

    Args:
        connection: Connection to its server.
        pid: Its process id, which is also its process group.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.returncode: int | None = None  # as in Popen: negative if a signal ended it

    def poll(self) -> int | None:
        """Return the exit code; `None` while the command runs."""
        self.wait(0)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the command to end. If the server has ended, kill the command."""
        if self.returncode is not None or not arrived(self.connection, timeout):
            return
        try:
            message = self.connection.recv(LARGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:  # a signal handler called this function and has read the message
            return
        except ConnectionError:
            message = b""
        if not message:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.returncode = int(message or -signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM, unless the command has ended. The server keeps its process id reserved until then."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


def arrived(connection: socket.socket, timeout: float) -> bool:
    """Wait up to `timeout` seconds for a message or the end of the connection; return whether one came."""
    poll = select.poll()  # select() takes no descriptor above 1,023
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1000 * timeout))


# ---- the server -----------------------------------------------------------------------------------------------------


def serve(connection: socket.socket) -> list[str] | None:
    """Fork a process for each command that the client sends, one after the other.

    Returns:
        In a forked process, the arguments of its command; in the server, `None` once the client has closed the
        connection.
    """
    ended = None  # process id of the previous command, whose exit code has been sent
    try:
        connection.send(READY)
        while True:
            request, descriptors, _, _ = socket.recv_fds(connection, LARGEST, DESCRIPTORS)
            if ended is not None:
                os.waitpid(ended, 0)  # only now may its process id be used again
            if not request:
                return None
            if not (pid := os.fork()):
                connection.close()
                redirect_output(descriptors[0])
                arguments: list[str] = json.loads(request)
                return arguments
            with contextlib.suppress(OSError):  # the child does the same; either may be first
                os.setpgid(pid, pid)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.send(str(pid).encode())
            connection.send(str(exit_code(pid)).encode())
            ended = pid
    except ConnectionError:  # the client has been killed; the command has ended
        return None


def redirect_output(output: int) -> None:
    """Give a forked process its own process group, and redirect its standard output and error to `output`."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)


def exit_code(pid: int) -> int:
    """Wait for a child to end, leave it as a zombie, and return its exit code as `subprocess` does."""
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert end is not None  # waitid blocks
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
