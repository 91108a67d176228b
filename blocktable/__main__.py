"""``python -m blocktable`` is the ``blocktable`` command."""

from blocktable.cli import main

main()
