from benchmarks.memory.command import main

raise SystemExit(main())
