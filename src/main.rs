//! Arguments in, exit code out.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    burdock::cli::Cli::parse().execute()
}
