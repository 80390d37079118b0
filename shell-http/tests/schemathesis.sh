#!/usr/bin/env bash
# Thousands of generated calls against a server, checked against its own description: no 5xx, no answer that
# is not described, nothing accepted that the description forbids.
#
#   shell-http/tests/schemathesis.sh [CASES for each operation and phase, default 20] [more arguments]
#
# Needs Python 3 and, the first time, PyPI: exits 77 if it cannot be had. The server is taken from
# $LEASEHOLD_BINARY, else the release build.
set -euo pipefail
cd "$(dirname "$0")/../.."
cases=${1:-20}
shift || true
target=${CARGO_TARGET_DIR:-target}
binary=${LEASEHOLD_BINARY:-$target/release/leasehold}
unset "${!LEASEHOLD_@}"
venv=$target/schemathesis-4.32.5
if [ ! -x "$venv/bin/schemathesis" ]; then
  python3 -m venv "$venv" && "$venv/bin/pip" --quiet --disable-pip-version-check install schemathesis==4.32.5 ||
    { rm -rf "$venv"; echo "schemathesis cannot be had"; exit 77; }
fi
venv=$(cd "$venv" && pwd)

work=$(mktemp -d)
"$binary" --listen 127.0.0.1:0 --store "disk:$work/store" 2> "$work/log" < /dev/null &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server || true; rm -rf "$work"' EXIT
for _ in $(seq 100); do
  address=$(sed -n 's/.*address=\([^ ]*\).*/\1/p' "$work/log")
  [ -z "$address" ] || break
  sleep 0.1
done
[ -n "$address" ] || { cat "$work/log"; exit 1; }
rss() { awk '/^VmRSS/ {print int($2 / 1024)}' "/proc/$server/status"; }
before=$(rss)

# Left out are checks whose premise does not hold here:
#   positive_data_acceptance   the description counts characters where the server counts bytes, and cannot say
#                              that `max_ms` is at least `base_ms`; what is refused is 422 with its field
#   ignored_auth               there is none in this release
cat > "$work/schemathesis.toml" <<'TOML'
[checks]
positive_data_acceptance.enabled = false
ignored_auth.enabled = false
TOML
cd "$work"
status=0
"$venv/bin/schemathesis" --config-file "$work/schemathesis.toml" run "http://$address/openapi.json" \
  --max-examples "$cases" --workers 2 --suppress-health-check all --generation-database none --no-color \
  --request-timeout 70 "$@" || status=$?
echo "server memory: $before MiB before, $(rss) MiB after"
! grep -E 'ERROR|panicked' "$work/log" || status=1
kill -0 $server || status=1
exit $status
