"""The console command `tfdpsq STAGE ...`, equal to `python -m tfdpsq.run STAGE ...`."""

from tfdpsq.run.command import main

if __name__ == "__main__":
    main()
