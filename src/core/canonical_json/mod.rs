//! Which bytes does a JSON document stand for when it is hashed, signed or sent?
//!
//! One pass from JSON text to canonical text: no spaces, keys in code point order, the shortest escapes. No tree is
//! built, and numbers are never squeezed through a float, because rooms of versions 1 to 5 hold floats and integers of any
//! size that must come out as Python writes them, or every receiver computes another hash.

mod number;
#[cfg(test)]
mod tests;
mod value;

pub use value::{Elements, Members, Value};

/// Deepest nesting of arrays and objects. Python's own reader gives up at about the same depth, so no event that a
/// homeserver could store is refused.
pub const MAX_DEPTH: usize = 1000;

/// Why a text has no canonical form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CanonicalError {
    /// Not JSON (`NaN` and `Infinity`, which Python reads, included).
    #[error("not valid JSON at byte {at}")]
    Syntax {
        /// Byte offset.
        at: usize,
    },
    /// Nested deeper than [`MAX_DEPTH`].
    #[error("nested deeper than {MAX_DEPTH} levels")]
    TooDeep,
    /// Half of a surrogate pair: it has no UTF-8 form.
    #[error("lone surrogate at byte {at}")]
    LoneSurrogate {
        /// Byte offset of its escape.
        at: usize,
    },
    /// A number beyond what a double can hold, such as `1e999`.
    #[error("number out of range at byte {at}")]
    NumberRange {
        /// Byte offset.
        at: usize,
    },
}

/// The canonical form of a JSON text. Of equal keys the last one counts, as in Python.
///
/// # Errors
/// When the text is not JSON or has no canonical form.
pub fn encode(text: &str) -> Result<String, CanonicalError> {
    let mut encoder = Encoder {
        text,
        bytes: text.as_bytes(),
        at: 0,
        depth: 0,
        out: String::with_capacity(text.len()),
        members: Vec::new(),
        scratch: String::new(),
    };
    encoder.space();
    encoder.value()?;
    encoder.space();
    if encoder.at == text.len() {
        Ok(encoder.out)
    } else {
        Err(encoder.syntax())
    }
}

/// Appends `text` as a canonical JSON string, quotes included.
pub fn push_string(out: &mut String, text: &str) {
    out.push('"');
    let mut rest = text;
    while let Some(next) = find(rest.as_bytes(), needs_care) {
        let (plain, special) = rest.split_at(next);
        out.push_str(plain);
        let mut chars = special.chars();
        if let Some(c) = chars.next() {
            push_escaped(out, c);
        }
        rest = chars.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

/// Bytes that end a plain run inside a string.
fn needs_care(byte: u8) -> bool {
    byte < 0x20 || byte == b'"' || byte == b'\\'
}

/// Where the first byte is that `wanted` holds for. It goes in blocks, because those become vector instructions, and
/// most of an event is long strings.
fn find(bytes: &[u8], wanted: impl Fn(u8) -> bool) -> Option<usize> {
    let (blocks, _) = bytes.as_chunks::<16>();
    let clear = blocks
        .iter()
        .take_while(|block| !block.iter().fold(false, |any, &byte| any | wanted(byte)));
    let start = clear.count() * 16;
    bytes[start..]
        .iter()
        .position(|&byte| wanted(byte))
        .map(|at| start + at)
}

fn push_escaped(out: &mut String, c: char) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        c if c < ' ' => {
            out.push_str(if c < '\u{10}' { "\\u000" } else { "\\u001" });
            out.extend(char::from_digit(u32::from(c) & 0xf, 16));
        }
        c => out.push(c),
    }
}

/// Where one `"key":value` lies in the output.
#[derive(Clone, Copy)]
struct Member {
    start: usize,
    /// Just after the key's closing quote.
    key_end: usize,
    end: usize,
}

struct Encoder<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    depth: usize,
    out: String,
    /// Members of all objects that are open; each object owns the tail it pushed.
    members: Vec<Member>,
    scratch: String,
}

impl Encoder<'_> {
    fn syntax(&self) -> CanonicalError {
        CanonicalError::Syntax { at: self.at }
    }

    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn value(&mut self) -> Result<(), CanonicalError> {
        match self.peek() {
            Some(b'"') => self.string(),
            Some(b'{') => self.nested(Self::object),
            Some(b'[') => self.nested(Self::array),
            Some(b't') => self.literal("true"),
            Some(b'f') => self.literal("false"),
            Some(b'n') => self.literal("null"),
            Some(b'-' | b'0'..=b'9') => {
                self.at += number::push(&mut self.out, self.text, self.at)?;
                Ok(())
            }
            _ => Err(self.syntax()),
        }
    }

    fn nested(&mut self, inner: fn(&mut Self) -> Result<(), CanonicalError>) -> Result<(), CanonicalError> {
        if self.depth == MAX_DEPTH {
            return Err(CanonicalError::TooDeep);
        }
        self.depth += 1;
        self.at += 1;
        self.space();
        inner(self)?;
        self.depth -= 1;
        Ok(())
    }

    fn literal(&mut self, word: &str) -> Result<(), CanonicalError> {
        if !self.bytes[self.at..].starts_with(word.as_bytes()) {
            return Err(self.syntax());
        }
        self.at += word.len();
        self.out.push_str(word);
        Ok(())
    }

    /// After an item: true if another follows, false at `close`.
    fn another(&mut self, close: u8) -> Result<bool, CanonicalError> {
        self.space();
        let next = self.peek();
        if next != Some(b',') && next != Some(close) {
            return Err(self.syntax());
        }
        self.at += 1;
        if next == Some(close) {
            return Ok(false);
        }
        self.space();
        self.out.push(',');
        Ok(true)
    }

    fn array(&mut self) -> Result<(), CanonicalError> {
        self.out.push('[');
        if self.peek() == Some(b']') {
            self.at += 1;
        } else {
            loop {
                self.value()?;
                if !self.another(b']')? {
                    break;
                }
            }
        }
        self.out.push(']');
        Ok(())
    }

    fn object(&mut self) -> Result<(), CanonicalError> {
        self.out.push('{');
        let first = self.members.len();
        if self.peek() == Some(b'}') {
            self.at += 1;
        } else {
            loop {
                let start = self.out.len();
                if self.peek() != Some(b'"') {
                    return Err(self.syntax());
                }
                self.string()?;
                let key_end = self.out.len();
                self.space();
                if self.peek() != Some(b':') {
                    return Err(self.syntax());
                }
                self.at += 1;
                self.out.push(':');
                self.space();
                self.value()?;
                let end = self.out.len();
                self.members.push(Member { start, key_end, end });
                if !self.another(b'}')? {
                    break;
                }
            }
            self.sort(first);
        }
        self.out.push('}');
        Ok(())
    }

    /// Puts the members from `first` on in order and drops them from the list.
    fn sort(&mut self, first: usize) {
        let out = &self.out;
        let key = |member: &Member| Key(&out[member.start + 1..member.key_end - 1]);
        let members = &mut self.members[first..];
        if !members.is_sorted_by(|a, b| key(a) < key(b)) {
            let start = members[0].start;
            members.sort_by(|a, b| key(a).cmp(&key(b)));
            self.scratch.clear();
            for (index, member) in members.iter().enumerate() {
                // The sort is stable, so the last of equal keys is the one that came last.
                if members.get(index + 1).is_some_and(|next| key(next) == key(member)) {
                    continue;
                }
                if !self.scratch.is_empty() {
                    self.scratch.push(',');
                }
                self.scratch.push_str(&out[member.start..member.end]);
            }
            self.out.truncate(start);
            self.out.push_str(&self.scratch);
        }
        self.members.truncate(first);
    }

    fn string(&mut self) -> Result<(), CanonicalError> {
        self.at += 1;
        self.out.push('"');
        loop {
            let run = find(&self.bytes[self.at..], needs_care);
            let end = self.at + run.ok_or(CanonicalError::Syntax { at: self.bytes.len() })?;
            self.out.push_str(&self.text[self.at..end]);
            self.at = end;
            match self.bytes[end] {
                b'"' => break,
                b'\\' => self.escape()?,
                _ => return Err(self.syntax()),
            }
        }
        self.at += 1;
        self.out.push('"');
        Ok(())
    }

    fn escape(&mut self) -> Result<(), CanonicalError> {
        let at = self.at;
        self.at += 1;
        let c = match self.peek() {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                let unit = self.hex()?;
                let low = (0xd800..0xdc00).contains(&unit) && self.bytes[self.at..].starts_with(b"\\u");
                let code = if low {
                    self.at += 1;
                    let second = self.hex()?;
                    if !(0xdc00..0xe000).contains(&second) {
                        return Err(CanonicalError::LoneSurrogate { at });
                    }
                    0x1_0000 + ((unit - 0xd800) << 10) + (second - 0xdc00)
                } else {
                    unit
                };
                push_escaped(
                    &mut self.out,
                    char::from_u32(code).ok_or(CanonicalError::LoneSurrogate { at })?,
                );
                return Ok(());
            }
            _ => return Err(self.syntax()),
        };
        self.at += 1;
        push_escaped(&mut self.out, c);
        Ok(())
    }

    /// The code unit of a `\u` escape; `at` is on its `u`, and afterwards behind its digits.
    fn hex(&mut self) -> Result<u32, CanonicalError> {
        let digits = self.bytes.get(self.at + 1..self.at + 5).ok_or(self.syntax())?;
        let mut unit = 0;
        for &digit in digits {
            unit = unit << 4 | char::from(digit).to_digit(16).ok_or(self.syntax())?;
        }
        self.at += 5;
        Ok(unit)
    }
}

/// An encoded key, ordered as the text it stands for.
#[derive(PartialEq, Eq)]
struct Key<'a>(&'a str);

impl Ord for Key<'_> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        if self.0.contains('\\') || other.0.contains('\\') {
            value::unescape(self.0).cmp(&value::unescape(other.0))
        } else {
            self.0.cmp(other.0)
        }
    }
}

impl PartialOrd for Key<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
