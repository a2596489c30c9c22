//! The sender under test: Burdock, or Synapse's own to compare and to hand over.

use std::{path::Path, process::Command, time::Duration};

use anyhow::{Result, ensure};
use serde_json::json;

use super::{Rig, process::Process, services::free_port, synapse::answers};

/// Whose sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Burdock,
    Python,
}

impl Kind {
    /// Burdock; with `BURDOCK_TEST_SENDER=python` in the environment it is Synapse's own, to see what that makes of a
    /// case.
    pub fn under_test() -> Self {
        match std::env::var("BURDOCK_TEST_SENDER") {
            Ok(kind) if kind == "python" => Self::Python,
            _ => Self::Burdock,
        }
    }
}

/// A running sender. It is killed when dropped.
pub struct Sender {
    pub process: Process,
    kind: Kind,
}

impl Rig {
    /// The only sender: Burdock, as `fed1`. Ready when this returns.
    pub async fn burdock(&self) -> Result<Sender> {
        self.sender(Kind::under_test(), "fed1", &["fed1"]).await
    }

    /// The same, as soon as the process runs.
    pub fn burdock_unready(&self) -> Result<Sender> {
        let (sender, _) = self.spawn_sender(Kind::under_test(), "fed1", &["fed1"])?;
        Ok(sender)
    }

    /// A sender named `name`, of the configured `instances`. Ready when this returns.
    pub async fn sender(&self, kind: Kind, name: &str, instances: &[&str]) -> Result<Sender> {
        let (mut sender, url) = self.spawn_sender(kind, name, instances)?;
        sender
            .process
            .wait_until(Duration::from_secs(30), || answers(&self.hs1.http, &url))
            .await?;
        Ok(sender)
    }

    /// A sender, and the URL where it will answer.
    fn spawn_sender(&self, kind: Kind, name: &str, instances: &[&str]) -> Result<(Sender, String)> {
        let (worker, listen) = (free_port()?, free_port()?);
        let config = json!({
            "worker_app": "synapse.app.generic_worker",
            "worker_name": name,
            "worker_log_config": self.dir().join("log.yaml"),
            "worker_listeners": [{
                "type": "http",
                "port": worker,
                "bind_addresses": ["127.0.0.1"],
                "resources": [{ "names": ["health"] }],
            }],
            "federation_sender_instances": instances,
        });
        let path = self.dir().join(format!("{name}.yaml"));
        std::fs::write(&path, config.to_string())?;

        let (mut command, port, log) = match kind {
            Kind::Burdock => (
                self.burdock_command(&path, name, listen)?,
                listen,
                format!("burdock-{name}"),
            ),
            Kind::Python => {
                let mut command = Command::new(&self.services.python);
                command
                    .args(["-m", "synapse.app.generic_worker", "-c"])
                    .arg(&self.hs1.config)
                    .arg("-c")
                    .arg(&path);
                (command, worker, format!("python-{name}"))
            }
        };
        let process = Process::spawn(&self.dir(), &log, command.current_dir(self.dir()))?;
        Ok((Sender { process, kind }, format!("http://127.0.0.1:{port}")))
    }

    fn burdock_command(&self, worker: &Path, name: &str, listen: u16) -> Result<Command> {
        let own = self.dir().join(format!("{name}.toml"));
        std::fs::write(&own, format!("[listen]\naddress = \"127.0.0.1:{listen}\"\n"))?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_burdock"));
        command
            .arg("run")
            .arg("-c")
            .arg(&self.hs1.config)
            .arg("-c")
            .arg(worker)
            .arg("--config")
            .arg(own);
        Ok(command)
    }
}

impl Sender {
    /// Stops it as an operator would, and checks that it ends well.
    pub async fn stop(self) -> Result<()> {
        let status = self.process.stop().await?;
        ensure!(
            status.success() || self.kind == Kind::Python,
            "Burdock ended with {status} after a SIGTERM"
        );
        Ok(())
    }

    /// `kill -9`.
    pub fn kill(self) {
        self.process.kill();
    }

    /// Checks that it still runs.
    pub fn check_running(&mut self) -> Result<()> {
        match self.process.ended() {
            None => Ok(()),
            Some(status) => anyhow::bail!("the sender ended with {status}"),
        }
    }
}
