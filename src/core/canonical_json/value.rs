//! What does a canonical text say? A view that reads parts of it in place, without building a tree.

use std::borrow::Cow;

/// A value inside canonical text. On text that is not canonical its answers are meaningless, but it never panics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Value<'a>(&'a str);

impl<'a> Value<'a> {
    /// The value that `canonical` is, made by [`encode`](super::encode).
    #[must_use]
    pub fn of(canonical: &'a str) -> Self {
        Self(canonical)
    }

    /// Its text.
    #[must_use]
    pub fn text(self) -> &'a str {
        self.0
    }

    /// It is `null`.
    #[must_use]
    pub fn is_null(self) -> bool {
        self.0 == "null"
    }

    /// The string it is, if it is one.
    #[must_use]
    pub fn as_str(self) -> Option<Cow<'a, str>> {
        let inner = self.0.strip_prefix('"')?.strip_suffix('"')?;
        Some(if inner.contains('\\') {
            Cow::Owned(unescape(inner))
        } else {
            Cow::Borrowed(inner)
        })
    }

    /// The integer it is, if it is one and fits.
    #[must_use]
    pub fn as_i64(self) -> Option<i64> {
        self.0.parse().ok()
    }

    /// An object's members, in key order; `None` if it is not an object.
    #[must_use]
    pub fn members(self) -> Option<Members<'a>> {
        self.0.strip_prefix('{').map(Members)
    }

    /// An array's elements; `None` if it is not an array.
    #[must_use]
    pub fn elements(self) -> Option<Elements<'a>> {
        self.0.strip_prefix('[').map(Elements)
    }

    /// The member `key`, if it is an object that has it. The key must be one that canonical JSON does not escape.
    #[must_use]
    pub fn get(self, key: &str) -> Option<Value<'a>> {
        self.members()?.find_map(|(name, value)| (name == key).then_some(value))
    }
}

/// An object's members: key (still escaped, without quotes) and value.
#[derive(Clone, Debug)]
pub struct Members<'a>(&'a str);

impl<'a> Iterator for Members<'a> {
    type Item = (&'a str, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.0.strip_prefix(',').unwrap_or(self.0);
        let (key, rest) = rest.split_at_checked(string_len(rest)?)?;
        let rest = rest.strip_prefix(':')?;
        let (value, rest) = rest.split_at_checked(value_len(rest))?;
        self.0 = rest;
        Some((&key[1..key.len() - 1], Value(value)))
    }
}

/// An array's elements.
#[derive(Clone, Debug)]
pub struct Elements<'a>(&'a str);

impl<'a> Iterator for Elements<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.0.strip_prefix(',').unwrap_or(self.0);
        let (value, rest) = rest.split_at_checked(value_len(rest))?;
        self.0 = rest;
        (!value.is_empty()).then_some(Value(value))
    }
}

/// Bytes of the string that `text` begins with, both quotes included.
fn string_len(text: &str) -> Option<usize> {
    let bytes = text.strip_prefix('"')?.as_bytes();
    let mut at = 0;
    loop {
        at += super::find(bytes.get(at..)?, |b| b == b'"' || b == b'\\')?;
        if bytes[at] == b'"' {
            return Some(at + 2);
        }
        at += 2;
    }
}

/// Bytes of the value that `text` begins with.
fn value_len(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut depth = 0_usize;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => at += string_len(&text[at..]).unwrap_or(bytes.len() - at),
            b'{' | b'[' => {
                depth += 1;
                at += 1;
            }
            b'}' | b']' if depth > 0 => {
                depth -= 1;
                at += 1;
            }
            b',' | b'}' | b']' if depth == 0 => break,
            _ => at += 1,
        }
        if depth == 0 && matches!(byte, b'"' | b'}' | b']') {
            break;
        }
    }
    at
}

/// What the inside of a canonical string stands for.
pub(super) fn unescape(inner: &str) -> String {
    let mut text = String::with_capacity(inner.len());
    let mut rest = inner;
    while let Some((plain, escape)) = rest.split_once('\\') {
        text.push_str(plain);
        let mut chars = escape.chars();
        let c = match chars.next() {
            Some('b') => '\u{8}',
            Some('f') => '\u{c}',
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('u') => {
                let code = escape.get(1..5).and_then(|hex| u32::from_str_radix(hex, 16).ok());
                chars = escape.get(5..).unwrap_or_default().chars();
                code.and_then(char::from_u32).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
            Some(c) => c,
            None => break,
        };
        text.push(c);
        rest = chars.as_str();
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parts_are_found_in_place() {
        let text = r#"{"a":[1,"x,]",{"b":[]},[]],"n":null,"s":"q\"\\\u0001\n","z":{"y":-5}}"#;
        let value = Value::of(text);
        let keys: Vec<_> = value.members().unwrap().map(|(key, _)| key).collect();
        assert_eq!(keys, ["a", "n", "s", "z"]);
        let elements: Vec<_> = value.get("a").unwrap().elements().unwrap().map(Value::text).collect();
        assert_eq!(elements, ["1", "\"x,]\"", "{\"b\":[]}", "[]"]);
        assert!(value.get("n").unwrap().is_null());
        assert_eq!(value.get("s").unwrap().as_str().unwrap(), "q\"\\\u{1}\n");
        assert_eq!(value.get("z").unwrap().get("y").unwrap().as_i64(), Some(-5));
        assert_eq!(Value::of("{}").members().unwrap().count(), 0);
        assert_eq!(Value::of("[]").elements().unwrap().count(), 0);
        assert!(value.get("missing").is_none());
        assert!(Value::of("1").members().is_none());
        assert!(Value::of("1").get("a").is_none());
    }

    proptest! {
        #[test]
        fn text_that_is_not_canonical_is_survived(text in r#"[\[\]{}:,"\\u0-9aé ]{0,30}"#) {
            let value = Value::of(&text);
            let _ = (value.as_str(), value.as_i64(), value.get("a"));
            let _ = value.elements().map(|elements| elements.take(50).count());
        }
    }
}
