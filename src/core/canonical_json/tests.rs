//! Golden vectors, and the properties that hold for every document.

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;

#[test]
fn reproduces_the_golden_vectors() {
    let vectors: Json =
        serde_json::from_str(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/vectors.json"))).unwrap();
    for vector in vectors["canonical_json"].as_array().unwrap() {
        let canonical = encode(vector["input_json"].as_str().unwrap()).unwrap();
        assert_eq!(canonical, vector["canonical_utf8"].as_str().unwrap());
        let hex = vector["canonical_hex"].as_str().unwrap();
        let pairs = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap());
        assert_eq!(canonical.as_bytes(), pairs.collect::<Vec<_>>());
    }
}

#[test]
fn of_equal_keys_the_last_counts() {
    assert_eq!(encode(r#"{"b":1,"a":2,"b":3,"\u0062":4}"#).unwrap(), r#"{"a":2,"b":4}"#);
    assert_eq!(encode(r#"{"a":{"x":1},"a":[]}"#).unwrap(), r#"{"a":[]}"#);
}

#[test]
fn keys_are_ordered_by_what_they_stand_for_not_by_their_escapes() {
    // A quote (0x22) sorts before '#', though its escape begins with a backslash (0x5c).
    assert_eq!(
        encode(r##"{"#":1,"\"":2,"\u0001":3,"[":4,"\\":5,"]":6}"##).unwrap(),
        "{\"\\u0001\":3,\"\\\"\":2,\"#\":1,\"[\":4,\"\\\\\":5,\"]\":6}"
    );
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert_eq!(encode(&nested(MAX_DEPTH)).unwrap(), nested(MAX_DEPTH));
    assert_eq!(encode(&nested(MAX_DEPTH + 1)), Err(CanonicalError::TooDeep));
    let objects = "{\"a\":".repeat(100_000);
    assert_eq!(encode(&objects), Err(CanonicalError::TooDeep));
}

#[test]
fn half_a_surrogate_pair_is_refused() {
    for text in [
        r#""\ud800""#,
        r#""\udc00""#,
        r#""\ud800x""#,
        r#""\ud800\u0041""#,
        r#""\ud800\ud800""#,
    ] {
        assert_eq!(encode(text), Err(CanonicalError::LoneSurrogate { at: 1 }), "{text}");
    }
}

#[test]
fn what_is_not_json_is_refused() {
    for text in [
        "",
        " ",
        "{",
        "[",
        "\"",
        "\"\\",
        "\"\\u12",
        "\"\\u12g4\"",
        "\"\\x\"",
        "\"\n\"",
        "{\"a\"}",
        "{\"a\":}",
        "{a:1}",
        "[1,]",
        "{\"a\":1,}",
        "[,1]",
        "1 2",
        "NaN",
        "Infinity",
        "-Infinity",
        "-",
        "01",
        "1.",
        ".5",
        "1e",
        "1e+",
        "+1",
        "tru",
        "nulll",
        "{\"a\":1 \"b\":2}",
        "[1}",
        "{\"a\" 1}",
        "-01",
        "0x1",
    ] {
        assert!(
            matches!(encode(text), Err(CanonicalError::Syntax { .. })),
            "{text:?}: {:?}",
            encode(text)
        );
    }
    assert_eq!(encode("[1e999]"), Err(CanonicalError::NumberRange { at: 1 }));
}

#[test]
fn a_string_is_escaped_as_in_a_document() {
    let mut out = String::new();
    push_string(&mut out, "a\"\\/\u{1}\u{1f}\u{7f}\u{2028}é\n");
    assert_eq!(out, "\"a\\\"\\\\/\\u0001\\u001f\u{7f}\u{2028}é\\n\"");
}

fn documents() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i64>().prop_map(Json::from),
        any::<String>().prop_map(Json::from),
    ];
    leaf.prop_recursive(5, 64, 8, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Json::from),
            prop::collection::btree_map(any::<String>(), inner, 0..6).prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    #[test]
    fn equals_a_sorted_compact_encoding(document in documents()) {
        // serde_json keeps its maps sorted by bytes and escapes as little, so for integers the two must agree.
        let expected = serde_json::to_string(&document).unwrap();
        prop_assert_eq!(&encode(&serde_json::to_string_pretty(&document).unwrap()).unwrap(), &expected);
        prop_assert_eq!(encode(&expected).unwrap(), expected);
    }

    #[test]
    fn any_text_is_encoded_to_a_fixed_point_or_refused(text in ".*") {
        if let Ok(once) = encode(&text) {
            prop_assert_eq!(encode(&once).unwrap(), once);
        }
    }

    #[test]
    fn any_brackets_and_quotes_are_survived(text in r#"[\[\]{}:,"\\u0-9a-e.+\- ]{0,40}"#) {
        let ours = encode(&text);
        if serde_json::from_str::<Json>(&text).is_ok() {
            prop_assert!(ours.is_ok());
        }
    }

    #[test]
    fn a_pushed_string_reads_back(text in any::<String>()) {
        let mut out = String::new();
        push_string(&mut out, &text);
        prop_assert_eq!(Value::of(&out).as_str().unwrap(), text);
    }
}
