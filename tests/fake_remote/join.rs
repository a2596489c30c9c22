//! How a fake server joins a room of a real one, and leaves it.

use std::{sync::Arc, time::Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::{
    event::{authorization, event_id, sign},
    server::FakeServer,
};

/// A real server, through which rooms are joined.
#[derive(Debug, Clone)]
pub struct Resident {
    /// Its Matrix name.
    pub name: String,
    /// Where it serves federation without TLS.
    pub url: String,
    /// The client for it.
    pub http: reqwest::Client,
}

/// A join that is made but not sent.
pub struct Join {
    server: Arc<FakeServer>,
    resident: Resident,
    room_id: String,
    event: Value,
    version: u32,
}

/// Percent-encodes all that is not plainly harmless in a path.
pub fn encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => encoded.push(char::from(byte)),
            _ => encoded.extend(format!("%{byte:02X}").chars()),
        }
    }
    encoded
}

impl FakeServer {
    async fn request(&self, to: &Resident, method: &str, path: &str, content: Option<&Value>) -> Result<Value> {
        let header = authorization(&self.identity, method, path, &to.name, content);
        let mut request = to
            .http
            .request(method.parse()?, format!("{}{path}", to.url))
            .header("Authorization", header);
        if let Some(content) = content {
            request = request
                .header("Content-Type", "application/json")
                .body(content.to_string());
        }
        let response = request.send().await?;
        let status = response.status();
        let text = response.text().await?;
        ensure!(status.is_success(), "{method} {path} at {}: {status} {text}", to.name);
        Ok(serde_json::from_str(&text)?)
    }

    /// The id of this server's only user.
    pub fn user_id(&self) -> String {
        format!("@fake:{}", self.name())
    }

    /// The first half of a join.
    pub async fn make_join(self: &Arc<Self>, resident: &Resident, room_id: &str) -> Result<Join> {
        let path = format!(
            "/_matrix/federation/v1/make_join/{}/{}?ver=10&ver=11&ver=12",
            encode(room_id),
            encode(&self.user_id())
        );
        let template = self.request(resident, "GET", &path, None).await?;
        let version = template["room_version"]
            .as_str()
            .and_then(|version| version.parse().ok());
        Ok(Join {
            server: self.clone(),
            resident: resident.clone(),
            room_id: room_id.to_owned(),
            event: template["event"].clone(),
            version: version.context("make_join without a room version")?,
        })
    }

    /// Joins a room through `resident`, and is ready for its events at once. Returns when it was.
    pub async fn join(self: &Arc<Self>, resident: &Resident, room_id: &str) -> Result<Instant> {
        self.make_join(resident, room_id).await?.send().await?;
        Ok(self.finish_joining(room_id))
    }

    /// Leaves a room that it joined through `resident`.
    pub async fn leave(&self, resident: &Resident, room_id: &str) -> Result<()> {
        let path = format!(
            "/_matrix/federation/v1/make_leave/{}/{}",
            encode(room_id),
            encode(&self.user_id())
        );
        let template = self.request(resident, "GET", &path, None).await?;
        let version = template["room_version"]
            .as_str()
            .and_then(|version| version.parse().ok());
        let version = version.context("make_leave without a room version")?;
        let (id, event) = self.finish(template["event"].clone(), version);
        let path = format!("/_matrix/federation/v2/send_leave/{}/{}", encode(room_id), encode(&id));
        self.request(resident, "PUT", &path, Some(&event)).await?;
        Ok(())
    }

    fn finish(&self, mut event: Value, version: u32) -> (String, Value) {
        event["origin"] = json!(self.name());
        event["origin_server_ts"] = json!(burdock::core::clock::now().wall.0);
        if let Some(event) = event.as_object_mut() {
            event.remove("unsigned");
        }
        sign(&mut event, version, &self.identity);
        (event_id(&event, version), event)
    }
}

impl Join {
    /// The second half. Until [`FakeServer::finish_joining`] the server skips the room's events, and does not know its
    /// own join when asked. Returns the join's event id.
    pub async fn send(self) -> Result<String> {
        let Self {
            server,
            resident,
            room_id,
            event,
            version,
        } = self;
        let (id, event) = server.finish(event, version);
        server.record.set_room_version(&room_id, version);
        {
            let mut state = server.state.lock();
            state.joining.insert(room_id.clone());
            state.events.insert(id.clone(), event.clone());
        }
        let path = format!("/_matrix/federation/v2/send_join/{}/{}", encode(&room_id), encode(&id));
        server.request(&resident, "PUT", &path, Some(&event)).await?;
        Ok(id)
    }
}
