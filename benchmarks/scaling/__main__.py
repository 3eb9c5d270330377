from benchmarks.scaling.command import main

raise SystemExit(main())
