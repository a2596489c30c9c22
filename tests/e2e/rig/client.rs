//! Users of the real homeservers, and what they do.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::synapse::Synapse;
use crate::fake_remote::join::encode;

static TRANSACTION: AtomicU64 = AtomicU64::new(0);

/// A logged-in user.
#[derive(Debug, Clone)]
pub struct User {
    pub id: String,
    url: String,
    token: String,
    http: reqwest::Client,
}

/// What kind of room.
#[derive(Debug, Clone, Copy)]
pub struct RoomOptions {
    pub version: &'static str,
    pub history_visibility: &'static str,
}

impl Default for RoomOptions {
    fn default() -> Self {
        Self {
            version: "11",
            history_visibility: "shared",
        }
    }
}

const PASSWORD: &str = "correct horse";

impl Synapse {
    /// A new user of this homeserver.
    pub async fn register(&self, name: &str) -> Result<User> {
        let mut user = User {
            id: String::new(),
            url: self.url.clone(),
            token: String::new(),
            http: self.http.clone(),
        };
        let body = json!({ "username": name, "password": PASSWORD, "auth": { "type": "m.login.dummy" } });
        let answer = user.request("POST", "/register", Some(&body)).await?;
        answer["user_id"]
            .as_str()
            .context("no user id")?
            .clone_into(&mut user.id);
        answer["access_token"]
            .as_str()
            .context("no token")?
            .clone_into(&mut user.token);
        Ok(user)
    }
}

impl User {
    async fn request(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        self.request_at(method, &format!("/_matrix/client/v3{path}"), body)
            .await
    }

    async fn request_at(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value> {
        let url = format!("{}{path}", self.url);
        let mut request = self.http.request(method.parse()?, url);
        if !self.token.is_empty() {
            request = request.header("Authorization", format!("Bearer {}", self.token));
        }
        if let Some(body) = body {
            request = request
                .header("Content-Type", "application/json")
                .body(body.to_string());
        }
        let response = request.send().await?;
        let status = response.status();
        let text = response.text().await?;
        ensure!(status.is_success(), "{method} {path}: {status} {text}");
        Ok(serde_json::from_str(&text)?)
    }

    async fn post(&self, path: &str, body: &Value) -> Result<Value> {
        self.request("POST", path, Some(body)).await
    }

    /// Creates a public room.
    pub async fn create_room(&self, options: RoomOptions) -> Result<String> {
        let answer = self
            .post(
                "/createRoom",
                &json!({
                    "preset": "public_chat",
                    "room_version": options.version,
                    "initial_state": [{
                        "type": "m.room.history_visibility",
                        "state_key": "",
                        "content": { "history_visibility": options.history_visibility },
                    }],
                }),
            )
            .await?;
        Ok(answer["room_id"].as_str().context("no room id")?.to_owned())
    }

    /// Joins a room through a server in it.
    pub async fn join(&self, room_id: &str, via: &str) -> Result<()> {
        let path = format!(
            "/join/{}?server_name={}&via={}",
            encode(room_id),
            encode(via),
            encode(via)
        );
        self.post(&path, &json!({})).await?;
        Ok(())
    }

    pub async fn leave(&self, room_id: &str) -> Result<()> {
        self.post(&format!("/rooms/{}/leave", encode(room_id)), &json!({}))
            .await?;
        Ok(())
    }

    /// Invites a user.
    pub async fn invite(&self, room_id: &str, user_id: &str) -> Result<()> {
        self.post(
            &format!("/rooms/{}/invite", encode(room_id)),
            &json!({ "user_id": user_id }),
        )
        .await?;
        Ok(())
    }

    pub async fn ban(&self, room_id: &str, user_id: &str) -> Result<()> {
        self.post(
            &format!("/rooms/{}/ban", encode(room_id)),
            &json!({ "user_id": user_id }),
        )
        .await?;
        Ok(())
    }

    pub async fn kick(&self, room_id: &str, user_id: &str) -> Result<()> {
        self.post(
            &format!("/rooms/{}/kick", encode(room_id)),
            &json!({ "user_id": user_id }),
        )
        .await?;
        Ok(())
    }

    async fn put_event(&self, room_id: &str, what: &str, query: &str, body: &Value) -> Result<String> {
        let transaction = TRANSACTION.fetch_add(1, Ordering::Relaxed);
        let path = format!("/rooms/{}/{what}/{transaction}{query}", encode(room_id));
        let answer = self.request("PUT", &path, Some(body)).await?;
        Ok(answer["event_id"].as_str().context("no event id")?.to_owned())
    }

    /// Sends a message; its event id.
    pub async fn send(&self, room_id: &str, text: &str) -> Result<String> {
        self.put_event(room_id, "send/m.room.message", "", &message(text)).await
    }

    /// Sends a message that is sticky for this long.
    pub async fn send_sticky(&self, room_id: &str, text: &str, duration_ms: u32) -> Result<String> {
        let query = format!("?org.matrix.msc4354.sticky_duration_ms={duration_ms}");
        self.put_event(room_id, "send/m.room.message", &query, &message(text))
            .await
    }

    /// Sends this many messages, one after another.
    pub async fn send_many(&self, room_id: &str, count: usize, text: &str) -> Result<Vec<String>> {
        let mut ids = Vec::new();
        for n in 0..count {
            ids.push(self.send(room_id, &format!("{text} {n}")).await?);
        }
        Ok(ids)
    }

    /// Sends this many messages that are sticky for ten minutes, one after another.
    pub async fn send_many_sticky(&self, room_id: &str, count: usize, text: &str) -> Result<Vec<String>> {
        let mut ids = Vec::new();
        for n in 0..count {
            ids.push(self.send_sticky(room_id, &format!("{text} {n}"), 600_000).await?);
        }
        Ok(ids)
    }

    /// What the homeserver's main process, asked by an administrator, knows of a destination.
    pub async fn destination(&self, name: &str) -> Result<Value> {
        let path = format!("/_synapse/admin/v1/federation/destinations/{}", encode(name));
        self.request_at("GET", &path, None).await
    }

    pub async fn redact(&self, room_id: &str, event_id: &str) -> Result<String> {
        self.put_event(room_id, &format!("redact/{}", encode(event_id)), "", &json!({}))
            .await
    }

    /// Deactivates the account and asks for the user's erasure.
    pub async fn erase(&self) -> Result<()> {
        let identifier = json!({ "type": "m.id.user", "user": self.id });
        let auth = json!({ "type": "m.login.password", "identifier": identifier, "password": PASSWORD });
        self.post("/account/deactivate", &json!({ "erase": true, "auth": auth }))
            .await?;
        Ok(())
    }
}

fn message(text: &str) -> Value {
    json!({ "msgtype": "m.text", "body": text })
}
