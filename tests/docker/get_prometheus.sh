#!/bin/sh
# promtool and prometheus for the tests of docker/: nothing to do where PATH has them. Else Debian's package, unpacked into
# build/prometheus and not installed, so that it takes no root and starts no service.
set -eu
cd "$(dirname "$0")/../.."
into=build/prometheus

command -v promtool >/dev/null && command -v prometheus >/dev/null && exit 0
[ -x "$into/usr/bin/promtool" ] && [ -x "$into/usr/bin/prometheus" ] && exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "no promtool and prometheus in PATH, and no apt-get to fetch them: put a release of Prometheus into PATH" >&2
    exit 1
fi
rm -rf "$into" && mkdir -p "$into"
# Without package lists, as on a new machine, nothing is found; only root can fetch those.
(cd "$into" && apt-get -qq download prometheus) || {
    apt-get -qq update
    (cd "$into" && apt-get -qq download prometheus)
}
dpkg -x "$into"/prometheus_*.deb "$into"
rm "$into"/prometheus_*.deb
"$into/usr/bin/promtool" --version >/dev/null
