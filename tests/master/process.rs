//! `burdock master` as a process: it is killed, it is stopped, and it comes back on the same folder.

use std::{
    ffi::OsStr,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
};

use serde_json::{Value, json};

use super::rig::{PATIENCE, encode, until};

pub struct Process {
    child: Child,
    client: SocketAddr,
    pub http: reqwest::Client,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An address that is free now.
pub fn free() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    listener.local_addr().expect("an address")
}

impl Process {
    pub async fn start(folder: &Path, federation: SocketAddr, client: SocketAddr) -> Self {
        Self::start_with(folder, federation, client, &[]).await
    }

    /// The same, with more arguments.
    pub async fn start_with(folder: &Path, federation: SocketAddr, client: SocketAddr, more: &[&OsStr]) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let child = Command::new(env!("CARGO_BIN_EXE_burdock"))
            .arg("master")
            .arg("--dir")
            .arg(folder)
            .args(["--name", &federation.to_string(), "--listen", &federation.to_string()])
            .args(["--client", &client.to_string()])
            .args(more)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("started");
        let process = Self {
            child,
            client,
            http: reqwest::Client::new(),
        };
        until("it answers", async || {
            process
                .try_ask("GET", "/_matrix/client/versions", "", &json!({}))
                .await
                .ok()
        })
        .await;
        process
    }

    async fn try_ask(&self, method: &str, path: &str, token: &str, body: &Value) -> Result<Value, String> {
        let request = self.http.request(
            method.parse().expect("a method"),
            format!("http://{}{path}", self.client),
        );
        let request = if token.is_empty() {
            request
        } else {
            request.bearer_auth(token)
        };
        let answer = request
            .timeout(PATIENCE)
            .body(body.to_string())
            .send()
            .await
            .map_err(|error| error.to_string())?;
        let (status, text) = (answer.status(), answer.text().await.map_err(|error| error.to_string())?);
        if status.is_success() {
            serde_json::from_str(&text).map_err(|error| error.to_string())
        } else {
            Err(text)
        }
    }

    pub async fn ask(&self, method: &str, path: &str, token: &str, body: &Value) -> Value {
        self.try_ask(method, path, token, body)
            .await
            .unwrap_or_else(|error| panic!("{method} {path}: {error}"))
    }

    /// A new user's token, and a room of theirs.
    pub async fn user_with_room(&self) -> (String, String) {
        let body = json!({ "username": "ann", "auth": { "type": "m.login.dummy" } });
        let answer = self.ask("POST", "/_matrix/client/v3/register", "", &body).await;
        let token = answer["access_token"].as_str().expect("a token").to_owned();
        let answer = self
            .ask("POST", "/_matrix/client/v3/createRoom", &token, &json!({}))
            .await;
        (token, answer["room_id"].as_str().expect("an id").to_owned())
    }

    pub async fn send(&self, token: &str, room: &str, txn_id: &str) -> Result<String, String> {
        let path = format!(
            "/_matrix/client/v3/rooms/{}/send/m.room.message/{txn_id}?org.matrix.msc4354.sticky_duration_ms=600000",
            encode(room)
        );
        let answer = self.try_ask("PUT", &path, token, &json!({ "body": txn_id })).await?;
        Ok(answer["event_id"].as_str().expect("an id").to_owned())
    }

    async fn held(&self, token: &str, room: &str) -> Vec<Value> {
        let path = format!("/_burdock/rooms/{}/events", encode(room));
        let answer = self.ask("GET", &path, token, &json!({})).await;
        answer["events"].as_array().expect("a list").clone()
    }

    /// SIGKILL.
    pub fn kill(&self) {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-KILL", &pid]).status().expect("told");
    }

    /// SIGTERM, and its end.
    pub async fn terminate(mut self) -> ExitStatus {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status().expect("told");
        tokio::task::spawn_blocking(move || self.child.wait().expect("ended"))
            .await
            .expect("no panic")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_loses_nothing_that_was_answered_and_a_signal_ends_it_well() {
    let folder = tempfile::tempdir().expect("a folder");
    let (federation, client) = (free(), free());
    let mut process = Process::start(folder.path(), federation, client).await;
    let (token, room) = process.user_with_room().await;

    let mut answered = Vec::new();
    for round in 0..3 {
        // Killed somewhere in the middle of these.
        let sends = futures_util::future::join_all((0..20).map(|n| {
            let (process, token, room) = (&process, &token, &room);
            async move { process.send(token, room, &format!("{round}-{n}")).await.ok() }
        }));
        let killed = async {
            let path = format!("/_burdock/rooms/{}/events", encode(&room));
            until("something was sent", async || {
                let held = process.try_ask("GET", &path, &token, &json!({})).await.ok()?;
                let held = held["events"].as_array().map_or(0, Vec::len);
                (held > 5 + answered.len() + 3).then_some(())
            })
            .await;
            process.kill();
        };
        let (sent, ()) = tokio::join!(sends, killed);
        answered.extend(sent.into_iter().flatten());
        drop(process);
        process = Process::start(folder.path(), federation, client).await;
        let held = process.held(&token, &room).await;
        for id in &answered {
            let event = held.iter().find(|event| event["event_id"] == json!(id));
            assert_eq!(event.expect("it was answered")["sticky"], json!(true));
        }
        // What was not answered is sent again under its name, and is there once.
        for n in 0..20 {
            let id = process
                .send(&token, &room, &format!("{round}-{n}"))
                .await
                .expect("sent");
            if !answered.contains(&id) {
                answered.push(id);
            }
        }
        let messages = process.held(&token, &room).await;
        let messages = messages
            .iter()
            .filter(|event| event["type"] == json!("m.room.message"))
            .count();
        assert_eq!(messages, answered.len());
        assert_eq!(messages, 20 * (round + 1));
    }
    assert!(process.terminate().await.success());
}
