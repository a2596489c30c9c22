//! Who we are among the processes of the homeserver, who sends, who writes events, and how to reach them.

use super::{Replication, ReplicationEndpoint, Secret, error::ConfigError, node::Node, yaml::Layers};
use crate::core::id::InstanceName;

/// The main process's name on the wire; `instance_map` calls it `main`.
const MAIN: &str = "master";
const LEGACY_APP: &str = "synapse.app.federation_sender";
const LEGACY_KEYS: [&str; 4] = [
    "worker_replication_host",
    "worker_replication_port",
    "worker_replication_http_port",
    "worker_replication_http_tls",
];
/// Keys whose value names processes that do other work than sending (`stream_writers` apart).
const OTHER_JOBS: [&str; 5] = [
    "run_background_tasks_on",
    "update_user_directory_from_worker",
    "notify_appservices_from_worker",
    "media_instance_running_background_jobs",
    "pusher_instances",
];

/// `worker_name`, else `worker_app`, as Synapse has it.
pub(super) fn instance(layers: &Layers) -> Result<InstanceName, ConfigError> {
    let (name, app) = (layers.get("worker_name"), layers.get("worker_app"));
    let app_text = app.text()?;
    if app_text.as_deref() == Some("synapse.app.homeserver") {
        return Err(app.error(
            "says that this is the main process",
            "Burdock is a worker: set `worker_app: synapse.app.generic_worker` and a `worker_name`",
        ));
    }
    name.text()?.or(app_text).map(InstanceName::from).ok_or_else(|| {
        name.missing(
            "Give the worker's own file as the last -c; its `worker_name` is one of `federation_sender_instances`",
        )
    })
}

/// An `embedded` homeserver has no listener for replication: its streams are all in its database.
pub(super) fn read(layers: &Layers, instance: &InstanceName, embedded: bool) -> Result<Replication, ConfigError> {
    for key in LEGACY_KEYS {
        let node = layers.get(key);
        if node.is_present() {
            return Err(node.error(
                "is no longer supported, by Synapse as by Burdock",
                "Remove it and name the main process in `instance_map`: `main: {host: ..., port: ...}`",
            ));
        }
    }
    let sender_instances = senders(layers, instance)?;
    refuse_other_jobs(layers, instance)?;
    let event_writers = layers.get("stream_writers").get("events")?;
    let event_writers = match event_writers.one_or_more()? {
        None => vec![MAIN.into()],
        Some(names) if names.is_empty() => {
            return Err(event_writers.error("is empty", "Name the processes that write events, or remove the key"));
        }
        Some(names) => names.into_iter().map(InstanceName::from).collect(),
    };
    Ok(Replication {
        sender_instances,
        event_writers,
        instance_map: instance_map(layers, embedded)?,
        secret: secret(layers)?,
    })
}

fn senders(layers: &Layers, instance: &InstanceName) -> Result<Vec<InstanceName>, ConfigError> {
    let list = layers.get("federation_sender_instances");
    let Some(names) = list.texts()? else {
        return legacy_sender(layers, &list, instance);
    };
    let names: Vec<InstanceName> = names.into_iter().map(InstanceName::from).collect();
    if let Some((_, twice)) = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
        // The list's length and order decide who sends to whom.
        return Err(list.error(
            format!("names `{twice}` twice"),
            "Name each instance once, in the same order everywhere",
        ));
    }
    if !names.contains(instance) {
        return Err(not_a_sender(&list, instance));
    }
    Ok(names)
}

/// Without `federation_sender_instances` the only worker that sends is one of the old kind, alone.
fn legacy_sender(layers: &Layers, list: &Node<'_>, instance: &InstanceName) -> Result<Vec<InstanceName>, ConfigError> {
    if layers.get("worker_app").text()?.as_deref() != Some(LEGACY_APP) {
        return Err(not_a_sender(list, instance));
    }
    let send = layers.get("send_federation");
    if send.flag()? != Some(false) {
        return Err(send.error(
            "is not `false`, so the main process sends as well",
            format!("Replace it, in the file that all processes share, by `federation_sender_instances: [{instance}]`"),
        ));
    }
    Ok(vec![instance.clone()])
}

fn not_a_sender(list: &Node<'_>, instance: &InstanceName) -> ConfigError {
    list.error(
        format!("does not name `{instance}`, which is what `worker_name` calls this process"),
        format!("Add `{instance}` to `federation_sender_instances` in the file that all processes share, or correct `worker_name`"),
    )
}

/// Work that is given to us and that we cannot do would be done by nobody.
fn refuse_other_jobs(layers: &Layers, instance: &InstanceName) -> Result<(), ConfigError> {
    let writers = layers.get("stream_writers");
    let jobs = OTHER_JOBS.iter().map(|key| layers.get(key));
    for job in jobs.chain(writers.entries()?.into_iter().map(|(_, node)| node)) {
        if job
            .one_or_more()?
            .is_some_and(|names| names.iter().any(|name| name == instance.as_str()))
        {
            return Err(job.error(
                format!("gives `{instance}` other work than sending"),
                "Burdock only sends; give this work to another process",
            ));
        }
    }
    Ok(())
}

fn instance_map(layers: &Layers, embedded: bool) -> Result<Vec<(InstanceName, ReplicationEndpoint)>, ConfigError> {
    const HOW: &str = "Add `instance_map: {main: {host: ..., port: ...}}`, the main process's listener with the resource `replication`";
    let map = layers.get("instance_map");
    let main = map.get("main")?;
    if !main.is_present() && !embedded {
        return Err(main.missing(HOW));
    }
    let mut endpoints = Vec::new();
    for (name, entry) in map.entries()? {
        let endpoint = match entry.get("path")?.text()? {
            Some(path) => ReplicationEndpoint::Unix(path.into()),
            None => ReplicationEndpoint::Tcp {
                host: required(&entry.get("host")?, Node::text)?,
                port: required(&entry.get("port")?, |port| port.integer(1..=u16::MAX))?,
                tls: entry.get("tls")?.flag()?.unwrap_or(false),
            },
        };
        endpoints.push((InstanceName::from(if name == "main" { MAIN } else { name }), endpoint));
    }
    Ok(endpoints)
}

fn required<'a, T>(
    node: &Node<'a>,
    read: impl Fn(&Node<'a>) -> Result<Option<T>, ConfigError>,
) -> Result<T, ConfigError> {
    read(node)?.ok_or_else(|| node.missing("Give `host` and `port`, or the `path` of a Unix socket"))
}

fn secret(layers: &Layers) -> Result<Option<Secret>, ConfigError> {
    let (inline, path) = (
        layers.get("worker_replication_secret"),
        layers.get("worker_replication_secret_path"),
    );
    let inline_secret = inline.secret()?;
    if !path.is_present() {
        return Ok(inline_secret.filter(|secret| !secret.0.is_empty()));
    }
    if inline_secret.is_some() {
        return Err(path.error("is there beside `worker_replication_secret`", "Keep one of the two"));
    }
    Ok(path.file_content()?.map(|content| Secret(content.trim().to_owned())))
}
