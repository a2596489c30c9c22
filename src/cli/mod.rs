//! The subcommands, one file each.

mod check;
mod demo;
pub mod lifecycle;
mod logging;
mod run;

use std::{
    io::{Write, stdout},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Parser, Subcommand};

use crate::config::Config;

/// A Matrix federation sender that takes the place of Synapse's `federation_sender` worker.
#[derive(Debug, Parser)]
#[command(name = "burdock", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Send events, until stopped
    Run(ConfigArgs),
    /// Show the main job live: real homeservers on the loopback, nothing else needed
    Demo(demo::DemoArgs),
    /// Read the configuration, say what it means, and send nothing
    Check(ConfigArgs),
}

/// Where the configuration is.
#[derive(Debug, clap::Args)]
struct ConfigArgs {
    /// A configuration file of Synapse, or a folder of them; several times, as for a Synapse worker
    #[arg(short = 'c', long = "config-path", value_name = "FILE", required = true)]
    synapse: Vec<PathBuf>,
    /// Burdock's own settings
    #[arg(long = "config", value_name = "FILE")]
    own: Option<PathBuf>,
}

impl ConfigArgs {
    fn with_config(&self, command: impl FnOnce(Config) -> ExitCode) -> ExitCode {
        match Config::load(&self.synapse, self.own.as_deref()) {
            Ok(config) => command(config),
            Err(error) => {
                eprintln!("burdock: {error}");
                ExitCode::from(2)
            }
        }
    }
}

impl Cli {
    /// Carries out what the arguments ask for. The exit code is 0 if it went well, 1 if it failed, 2 if the
    /// configuration is wrong (or, from clap, the arguments are).
    #[must_use]
    pub fn execute(&self) -> ExitCode {
        match &self.command {
            Command::Run(args) => args.with_config(run::run),
            Command::Demo(args) => demo::run(args),
            Command::Check(args) => args.with_config(|config| {
                match stdout().write_all(check::summary(&config).as_bytes()) {
                    Ok(()) => ExitCode::SUCCESS,
                    Err(_) => ExitCode::FAILURE,
                }
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_a_synapse_workers() {
        Cli::command().debug_assert();
        let line = "burdock run -c homeserver.yaml --config-path workers/ --config burdock.toml";
        let cli = Cli::try_parse_from(line.split(' ')).expect("valid");
        let Command::Run(args) = cli.command else {
            panic!("not run");
        };
        assert_eq!(
            args.synapse,
            [PathBuf::from("homeserver.yaml"), PathBuf::from("workers/")]
        );
        assert_eq!(args.own, Some(PathBuf::from("burdock.toml")));
        assert!(
            Cli::try_parse_from(["burdock", "run"]).is_err(),
            "a configuration is needed"
        );
    }
}
