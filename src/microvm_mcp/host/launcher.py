"""Becomes another program, confined: run as `python3 -I -S launcher.py PLAN_FD STATUS_FD`, standard library only.

Reads its plan (JSON, see `process.Plan`) from one descriptor, steps into cgroup, namespaces and limits, gives up
every privilege and replaces itself. Whatever fails is written to the other descriptor as JSON (`stage`, `errno`,
`text`); that descriptor closes on a successful exec, so its end without a word means: the program runs.

Runs once per machine, as root, single-threaded, and must stay small: nothing of the project is imported, no
privileged step may come after the user changed, nothing is retried or skipped.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import stat
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would be a quarter of the start-up time
    from typing import TypedDict

    class TapPlan(TypedDict):
        name: str
        number: int

    class Plan(TypedDict):
        argv: list[str]
        environment: dict[str, str]
        uid: int
        gid: int
        cgroup: str | None
        netns: str | None
        tap: TapPlan | None
        descriptors: dict[str, int]
        devices: dict[str, bool]
        hidden: list[str]
        limits: dict[str, tuple[int, int]]


CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 1, 2, 4, 8, 16384, 1 << 19
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
MNT_DETACH, CLOSE_RANGE_CLOEXEC = 2, 4
ENODEV, EINVAL = 19, 22
TUNSETIFF = 0x400454CA
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
HIGH = 512
"""Descriptors are parked from here on while the low numbers are handed out."""

libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *args: int | bytes) -> None:
    wrapped = [ctypes.c_char_p(arg) if isinstance(arg, bytes) else ctypes.c_ulong(arg) for arg in args]
    if getattr(libc, name)(*wrapped) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def enter_cgroup(plan: Plan) -> None:
    if plan["cgroup"] is not None:
        with open(f"{plan['cgroup']}/cgroup.procs", "w") as procs:
            procs.write("0")


def enter_netns(plan: Plan) -> None:
    if plan["netns"] is not None:
        fd = os.open(plan["netns"], os.O_RDONLY | os.O_CLOEXEC)
        call("setns", fd, CLONE_NEWNET)
        os.close(fd)


def open_tap(plan: Plan, parked: dict[int, int]) -> None:
    """The TAP is opened here, inside its namespace: /dev/net/tun may be root's alone."""
    if plan["tap"] is not None:
        if libc.if_nametoindex(plan["tap"]["name"].encode()) == 0:
            # TUNSETIFF would make one.
            raise OSError(ENODEV, os.strerror(ENODEV), plan["tap"]["name"])
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", plan["tap"]["name"].encode(), flags))
        parked[plan["tap"]["number"]] = park(fd)


def park(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, HIGH)


def shrink_view(plan: Plan) -> None:
    """Own mount table: empty directories over what the program has no business in, a /dev with what it needs."""
    call("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS)
    # Slave: what happens in here stays in here, and what the host unmounts goes in here too, where its mounts are
    # shared. Where they are private our copies would keep it mounted, so those below hidden directories are let go.
    call("mount", b"none", b"/", b"none", MS_REC | MS_SLAVE, 0)
    for point in reversed(mount_points()):
        if any(point == path or point.startswith(path + "/") for path in plan["hidden"]):
            let_go(point)
    for path in plan["hidden"]:
        if stat.S_ISDIR(kind(path)):
            flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            call("mount", b"none", path.encode(), b"tmpfs", flags, b"size=4k,mode=0555")
    call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, b"hidepid=2")
    nodes = [(path, os.lstat(path).st_rdev, plan["devices"][path]) for path in plan["devices"]]
    call("mount", b"none", b"/dev", b"tmpfs", MS_NOSUID | MS_NOEXEC, b"size=64k,mode=0555")
    for path, device, private in nodes:
        os.mknod(path, 0o600 | stat.S_IFCHR, device)
        if private:
            os.chown(path, plan["uid"], plan["gid"])
        else:
            os.chmod(path, 0o666)  # noqa: S103, PTH101 - as on every host, and the umask is not to thin it


def mount_points() -> list[str]:
    """In the order in which they were mounted over each other."""
    with open("/proc/self/mountinfo") as mounts:
        fields = [line.split()[4] for line in mounts]
    return [field.encode().decode("unicode_escape").encode("latin-1").decode() for field in fields]


def let_go(mount_point: str) -> None:
    try:
        call("umount2", mount_point.encode(), MNT_DETACH)
    except OSError as error:
        if error.errno != EINVAL:  # it went with what it was mounted on
            raise


def kind(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def arrange_descriptors(parked: dict[int, int]) -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 0)
    start = 1
    for number in sorted(parked):
        os.closerange(start, number)
        os.dup2(parked[number], number)
        start = number + 1
    os.closerange(start, HIGH)
    call("close_range", HIGH, 0xFFFFFFFF, CLOSE_RANGE_CLOEXEC)


def drop_everything(plan: Plan) -> None:
    for name, (soft, hard) in plan["limits"].items():
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))
    capability = 0
    while True:
        try:
            call("prctl", PR_CAPBSET_DROP, capability, 0, 0, 0)
        except OSError as error:
            if error.errno == EINVAL and capability > 0:
                break
            raise
        capability += 1
    os.setgroups([])
    os.setresgid(plan["gid"], plan["gid"], plan["gid"])
    os.setresuid(plan["uid"], plan["uid"], plan["uid"])
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Outliving whoever started us is the point.
    call("prctl", PR_SET_PDEATHSIG, 0, 0, 0, 0)


def main() -> None:
    plan_fd, status = int(sys.argv[1]), park(int(sys.argv[2]))
    stage = "plan"
    try:
        with open(plan_fd, "rb") as file:
            plan = json.loads(file.read())
        parked = {int(number): park(fd) for number, fd in plan["descriptors"].items()}
        stage = "session"
        os.setsid()
        os.umask(0o077)
        os.chdir("/")
        stage = "cgroup"
        enter_cgroup(plan)
        stage = "network namespace"
        enter_netns(plan)
        stage = "tap"
        open_tap(plan, parked)
        stage = "mount namespace"
        shrink_view(plan)
        stage = "descriptors"
        arrange_descriptors(parked)
        stage = "privileges"
        drop_everything(plan)
        stage = "exec"
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            # Ignored by Python, and dispositions of that kind survive exec.
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.execve(plan["argv"][0], plan["argv"], plan["environment"])  # noqa: S606
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent must hear of it
        text = getattr(error, "strerror", None) or repr(error)
        if where := getattr(error, "filename", None):
            text = f"{text} ({where})"
        report = {
            "stage": stage,
            "errno": getattr(error, "errno", None),
            "text": f"{text} ({where})" if where else text,
        }
        os.write(status, json.dumps(report).encode()[:4000])
        os._exit(127)


if __name__ == "__main__":
    main()
