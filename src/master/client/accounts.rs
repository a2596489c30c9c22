//! Users and their access tokens. There are no passwords: who registers gets a token, and that is all there is.

use std::sync::Arc;

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use serde_json::{Value, json};

use super::authenticated::{JsonBody, User};
use crate::{
    core::id::MAX_ID_BYTES,
    master::{
        body,
        homeserver::Homeserver,
        refusal::{Answer, Json, Refusal, answer},
    },
};

impl Homeserver {
    /// Makes a user if there is none of that name. The whole user id, and whether it is new.
    pub(in crate::master) async fn register(&self, localpart: &str) -> Result<(String, bool), Refusal> {
        let user = format!("@{localpart}:{}", self.name);
        let allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"._=-/+".contains(&b);
        if localpart.is_empty() || !localpart.bytes().all(allowed) || user.len() > MAX_ID_BYTES {
            let text = "a user's name is of a-z, 0-9 and ._=-/+, and 255 bytes long at most, server name included";
            return Err(Refusal::new(StatusCode::BAD_REQUEST, "M_INVALID_USERNAME", text));
        }
        let new = self.sqlite.create_user(&user).await?;
        Ok((user, new))
    }
}

/// A name that nobody can guess.
fn random_name() -> Result<String, Refusal> {
    let mut random = [0; 24];
    getrandom::fill(&mut random).map_err(Refusal::failed)?;
    Ok(URL_SAFE_NO_PAD.encode(random))
}

pub(super) async fn register(
    State(homeserver): State<Arc<Homeserver>>,
    JsonBody(body): JsonBody,
) -> Result<Response, Refusal> {
    // A client asks first which ways to register there are.
    let way = body
        .get("auth")
        .and_then(|auth| auth.get("type"))
        .and_then(Value::as_str);
    if way != Some("m.login.dummy") {
        let ways = json!({ "flows": [{ "stages": ["m.login.dummy"] }], "params": {}, "session": random_name()? });
        return Ok(answer(StatusCode::UNAUTHORIZED, &ways));
    }
    let localpart = match body::text(&body, "username")? {
        Some(name) => name.to_owned(),
        None => random_name()?.to_ascii_lowercase(),
    };
    let (user, new) = homeserver.register(&localpart).await?;
    if !new {
        return Err(Refusal::new(
            StatusCode::BAD_REQUEST,
            "M_USER_IN_USE",
            "there is a user of that name",
        ));
    }
    if body.get("inhibit_login") == Some(&Value::Bool(true)) {
        return Ok(Json(json!({ "user_id": user })).into_response());
    }
    let device = match body::text(&body, "device_id")? {
        Some(device) if device.len() <= MAX_ID_BYTES => device.to_owned(),
        Some(_) => return Err(Refusal::malformed("`device_id` is too long")),
        None => random_name()?,
    };
    let token = random_name()?;
    homeserver.sqlite.add_token(&token, &user, &device).await?;
    let server = homeserver.name.as_str();
    let answer = json!({ "user_id": user, "access_token": token, "device_id": device, "home_server": server });
    Ok(Json(answer).into_response())
}

pub(super) async fn whoami(user: User) -> Answer {
    Ok(Json(
        json!({ "user_id": user.id, "device_id": user.device, "is_guest": false }),
    ))
}
