"""Stack profiles as TOML files, shipped in the wheel as `tracetools.profiles`. Data only: read them with tracetools.stackprofile."""
