"""python -m marsopt.profile. In Python ``marsopt.profile`` is the function: imported, a
module of its name would take its place, so that this one cannot be.
"""

if __name__ == "__main__":
    from marsopt.profiling.command import main

    main()
else:
    raise ImportError(
        "got an import of marsopt.profile, expected one of marsopt.profiling, the "
        "package: marsopt.profile is the function, and python -m marsopt.profile the "
        "command"
    )
