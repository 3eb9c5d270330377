from benchmarks.convergence.command import main

if __name__ == "__main__":  # its worker processes import the main module again
    raise SystemExit(main())
