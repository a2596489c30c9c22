//! The homeserver's signing key as Synapse's configuration gives it: a file, or a text among the settings.
//!
//! One key a line, three words: `ed25519 VERSION SEED`, the seed being 32 bytes in base64. Synapse signs requests and
//! events with the first key only; but any other line that is wrong keeps Synapse from starting, and us too.

use std::fs;

use base64::{Engine, alphabet, engine, engine::DecodePaddingMode};

use super::{error::ConfigError, yaml::Layers};
use crate::core::{id::ServerName, signing::SigningKey};

const GENERATE: &str = "Point it at the key file of this homeserver; its lines read `ed25519 a_AbCd BASE64`. \
                        If it was never made, `python -m synapse.app.homeserver -c homeserver.yaml --generate-keys` makes it";

/// Base64 with or without padding.
const BASE64: engine::GeneralPurpose = engine::GeneralPurpose::new(
    &alphabet::STANDARD,
    engine::GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// `signing_key`, else the file `signing_key_path`, else `<config folder>/<server_name>.signing.key`.
pub(super) fn read(layers: &Layers, server_name: &ServerName) -> Result<SigningKey, ConfigError> {
    let inline = layers.get("signing_key");
    if let Some(text) = inline.text()? {
        return parse(&text).map_err(|problem| inline.error(format!("is malformed: {problem}"), GENERATE));
    }
    let node = layers.get("signing_key_path");
    let path = match node.text()? {
        Some(path) => path.into(),
        None => layers.folder().join(format!("{server_name}.signing.key")),
    };
    let error = |problem: &dyn std::fmt::Display| {
        let names = if node.is_present() {
            "names"
        } else {
            "is absent and so means"
        };
        node.error(format!("{names} {}, {problem}", path.display()), GENERATE)
    };
    let text = fs::read_to_string(&path).map_err(|e| error(&format_args!("which cannot be read: {e}")))?;
    parse(&text).map_err(|problem| error(&format_args!("which is malformed: {problem}")))
}

/// The first key of `text`. The error says what is wrong with which line and holds nothing of its content.
pub(super) fn parse(text: &str) -> Result<SigningKey, String> {
    let mut first = None;
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let key = parse_line(line).map_err(|problem| format!("line {} {problem}", index + 1))?;
        first.get_or_insert(key);
    }
    first.ok_or_else(|| "no key is there".to_owned())
}

fn parse_line(line: &str) -> Result<SigningKey, &'static str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [algorithm, version, seed] = words[..] else {
        return Err("does not have the three words `ed25519 VERSION SEED`");
    };
    if algorithm != "ed25519" {
        return Err("has an algorithm other than ed25519");
    }
    // The version goes into a header between quotes.
    if !version.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        return Err("has a key version with characters other than letters, digits and `_`");
    }
    let seed = BASE64.decode(seed).map_err(|_| "has a seed that is not base64")?;
    let seed = seed
        .as_slice()
        .try_into()
        .map_err(|_| "has a seed that is not 32 bytes long")?;
    Ok(SigningKey::from_seed(version, seed))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seed 00..1f, as in `vectors.json`.
    const SEED: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8";

    #[test]
    fn the_first_key_counts() {
        let key = parse(&format!("\ned25519 a_test {SEED}\ned25519 a_old {SEED}=\n")).expect("a key");
        assert_eq!(key.key_id(), "ed25519:a_test");
        let expected = SigningKey::from_seed("a_test", &std::array::from_fn(|i| u8::try_from(i).unwrap_or(0)));
        assert_eq!(key.sign(&[b"x"]), expected.sign(&[b"x"]));
    }

    #[test]
    fn a_malformed_line_is_an_error_that_does_not_show_it() {
        let cases = [
            ("", "no key is there"),
            ("c2VjcmV0", "line 1 does not have the three words"),
            ("rsa a_1 c2VjcmV0", "line 1 has an algorithm"),
            ("ed25519 a\"b c2VjcmV0", "line 1 has a key version"),
            ("ed25519 a_1 c2VjcmV0", "line 1 has a seed that is not 32 bytes"),
            ("ed25519 a_1 c2VjcmV0!", "line 1 has a seed that is not base64"),
        ];
        for (text, expected) in cases {
            let problem = parse(text).expect_err(text);
            assert!(problem.contains(expected), "{problem}");
            assert!(!problem.contains("c2VjcmV0"), "{problem}");
        }
        let second = parse(&format!("ed25519 a_1 {SEED}\ngarbage")).expect_err("the second line");
        assert!(second.starts_with("line 2 "), "{second}");
    }
}
