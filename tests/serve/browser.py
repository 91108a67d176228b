"""Where a Chromium is, if there is one."""

import importlib.util
import os
import shutil

CHROMIUM = os.environ.get("BLOCKTABLE_CHROMIUM") or shutil.which("chromium")
AVAILABLE = CHROMIUM is not None and importlib.util.find_spec("playwright") is not None
