from benchmarks.long_context.command import main

raise SystemExit(main())
