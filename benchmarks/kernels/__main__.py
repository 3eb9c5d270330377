from benchmarks.kernels.command import main

raise SystemExit(main())
