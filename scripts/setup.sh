# shellcheck shell=bash
# Sourced by the front doors: installs what is missing, makes the environment, finds or makes a reflink volume.
# Every step is idempotent, says what it does, and can be interrupted and run again.
# shellcheck disable=SC2034  # the variables are for whoever sources this

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
VENV="$ROOT/.venv"
CACHE=${MICROVM_CACHE:-/var/cache/microvm-mcp}
UV_VERSION=0.13.9

RUN_PACKAGES=(qemu-system-x86 mmdebstrap xfsprogs e2fsprogs nftables iproute2 debian-archive-keyring busybox-static
  zstd kmod python3-venv ca-certificates)
TEST_PACKAGES=(shellcheck openssh-client procps git gcc)

say() { printf '==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

require_host() {
  [ "$(id -u)" = 0 ] || die "this needs root: run it with sudo"
  [ "$(uname -m)" = x86_64 ] || die "this needs an x86_64 host, not $(uname -m)"
  command -v apt-get >/dev/null || die "this needs Debian 12 or Ubuntu 24.04 or later (apt-get was not found)"
}

ensure_packages() {
  local missing=() name
  for name in "$@"; do
    dpkg-query -W -f '${db:Status-Status}' "$name" 2>/dev/null | grep -qx installed || missing+=("$name")
  done
  [ ${#missing[@]} -eq 0 ] && return
  say "installing ${missing[*]}"
  # An earlier run may have been interrupted between unpacking and configuring.
  dpkg --configure -a >/dev/null
  apt-get update -q >/dev/null || die "apt-get update failed: check the network and /etc/apt/sources.list*"
  DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >/dev/null ||
    die "apt-get install failed: run 'apt-get install ${missing[*]}' to see why"
}

find_python() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    if "$candidate" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
  die "this needs Python 3.11 or newer with venv: Debian 12 and Ubuntu 24.04 have it (apt-get install python3-venv)"
}

# ensure_environment run|dev: .venv as uv.lock says; `run` leaves development packages that are there alone.
ensure_environment() {
  local python uv
  python=$(find_python) || exit 1
  uv="$CACHE/uv-$UV_VERSION/bin/uv"
  if ! "$uv" --version >/dev/null 2>&1; then
    say "installing uv $UV_VERSION (pinned by hash)"
    rm -rf "$CACHE/uv-$UV_VERSION"
    mkdir -p "$CACHE"
    "$python" -m venv "$CACHE/uv-$UV_VERSION"
    "$CACHE/uv-$UV_VERSION/bin/python" -m pip install -q --disable-pip-version-check --no-deps --only-binary=:all: \
      --require-hashes -r "$ROOT/scripts/uv-requirements.txt" || die "uv could not be installed from PyPI"
  fi
  say "making the environment from uv.lock"
  local flags=(--frozen --quiet --no-python-downloads --python "$python" --project "$ROOT")
  if [ "$1" = dev ]; then "$uv" sync "${flags[@]}"; else "$uv" sync "${flags[@]}" --no-dev --inexact; fi ||
    die "the environment could not be made: see the message above"
}

can_reflink() {
  local probe status=1
  probe=$(mktemp -d "$1/.reflink-XXXXXX") || return 1
  printf x >"$probe/a"
  cp --reflink=always "$probe/a" "$probe/b" 2>/dev/null && status=0
  rm -rf "$probe"
  return $status
}

# ensure_volume DIR GIB: DIR lies on a file system with reflinks; if not, a sparse XFS file DIR.xfs is mounted there.
ensure_volume() {
  local dir=$1 gib=$2
  mkdir -p "$dir"
  chmod 0700 "$dir"
  can_reflink "$dir" && return
  if [ -n "$(ls -A "$dir")" ]; then
    die "$dir is not empty and its file system has no reflinks: move it to XFS (mkfs.xfs -m reflink=1) or btrfs"
  fi
  if [ ! -e "$dir.xfs" ]; then
    say "$dir has no reflinks: making the sparse XFS file $dir.xfs of $gib GiB"
    rm -f "$dir.xfs.new"
    truncate -s "${gib}G" "$dir.xfs.new"
    mkfs.xfs -q -m reflink=1 "$dir.xfs.new"
    mv "$dir.xfs.new" "$dir.xfs"
  fi
  say "mounting $dir.xfs on $dir"
  mount -o loop,nosuid "$dir.xfs" "$dir" || die "$dir.xfs could not be mounted: are loop devices available?"
  chmod 0700 "$dir"
  can_reflink "$dir" || die "$dir.xfs has no reflinks: remove it and run this again"
}
