"""A file for ms-swift's `--external_plugins`: losses and the number of chunks of its process are printed."""

from tests.integrations.chunk_counter import report_until_exit

report_until_exit()
