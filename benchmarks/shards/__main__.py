from benchmarks.shards.command import main

raise SystemExit(main())
