#!/usr/bin/env bash
# Usage: browser.sh. Installs Chromium for tests/browser where it is missing and may be installed:
# on Debian and Ubuntu, as root. Elsewhere it says what these tests need; they are skipped.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    if command -v "$name" >/dev/null; then exit 0; fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    if apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; then
        exit 0
    fi
fi
echo "SKIPPED: the browser tests (tests/browser) need Chromium, which cannot be installed here;" \
    "install it (chromium, chromium-browser or google-chrome on PATH) and run make test again" >&2
