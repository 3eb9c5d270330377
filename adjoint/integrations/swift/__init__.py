"""ms-swift: `--external_plugins` takes the path of the file beside this one, which is `PLUGIN`.

    external_plugins: [/path/to/adjoint/integrations/swift/plugin.py]
    ENV:
      ADJOINT_METHOD__CHUNK_SIZE: 4096

ms-swift puts the plugin's folder before all others on Python's path. So the file has a folder of its own: the
one above has modules named like packages.
"""

from pathlib import Path

PLUGIN = str(Path(__file__).with_name("plugin.py"))
