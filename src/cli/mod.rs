//! The subcommands, one file each.

mod check;
mod demo;
pub mod lifecycle;
mod listening;
mod logging;
pub mod master;
mod run;
pub mod sending;

use std::{
    io::{Write, stdout},
    path::PathBuf,
    process::ExitCode,
};

use clap::{Parser, Subcommand};

use crate::config::{Config, ConfigError};

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
    /// Be a small homeserver, with a sender of its own or for one beside it
    Master(master::MasterArgs),
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
    fn load(&self) -> Result<Config, ConfigError> {
        Config::load(&self.synapse, self.own.as_deref())
    }
}

impl Cli {
    /// Carries out what the arguments ask for. The exit code is 0 if it went well, 1 if it failed, 2 if the
    /// configuration is wrong (or, from clap, the arguments are).
    #[must_use]
    pub fn execute(&self) -> ExitCode {
        match &self.command {
            Command::Run(args) => with(args.load(), run::run),
            Command::Demo(args) => demo::run(args),
            Command::Check(args) => with(args.load(), |config| {
                match stdout().write_all(check::summary(&config).as_bytes()) {
                    Ok(()) => ExitCode::SUCCESS,
                    Err(_) => ExitCode::FAILURE,
                }
            }),
            Command::Master(args) => with(args.load(), |loaded| master::run(args, loaded)),
        }
    }
}

/// Goes on with what was configured, or says what is wrong with it.
fn with<T>(loaded: Result<T, ConfigError>, go_on: impl FnOnce(T) -> ExitCode) -> ExitCode {
    match loaded {
        Ok(loaded) => go_on(loaded),
        Err(error) => {
            eprintln!("burdock: {error}");
            ExitCode::from(2)
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
