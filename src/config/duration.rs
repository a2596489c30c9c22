//! Lengths of time as Synapse writes them: `10m`, or an integer of milliseconds.

use std::time::Duration;

/// How a length of time is written, for error messages.
pub(super) const GRAMMAR: &str =
    "Give an integer of milliseconds, or an integer and one of s, m, h, d, w, y, for example `90s`";

/// Reads a length of time. `None` if it is not one, or negative, or beyond what milliseconds in 63 bits hold.
pub(super) fn parse(text: &str) -> Option<Duration> {
    const SECOND: i64 = 1000;
    const DAY: i64 = 24 * 60 * 60 * SECOND;
    let (digits, unit) = match text.as_bytes().last()? {
        b's' => (&text[..text.len() - 1], SECOND),
        b'm' => (&text[..text.len() - 1], 60 * SECOND),
        b'h' => (&text[..text.len() - 1], 60 * 60 * SECOND),
        b'd' => (&text[..text.len() - 1], DAY),
        b'w' => (&text[..text.len() - 1], 7 * DAY),
        b'y' => (&text[..text.len() - 1], 365 * DAY),
        _ => (text, 1),
    };
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let ms = digits.parse::<i64>().ok()?.checked_mul(unit)?;
    Some(Duration::from_millis(ms.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_digits_are_milliseconds_and_suffixes_are_synapses() {
        let ms = |text| parse(text).map(|d| d.as_millis());
        assert_eq!(ms("10"), Some(10));
        assert_eq!(ms("1s"), Some(1000));
        assert_eq!(ms("2m"), Some(120_000));
        assert_eq!(ms("1h"), Some(3_600_000));
        assert_eq!(ms("7d"), Some(604_800_000));
        assert_eq!(ms("1w"), Some(604_800_000));
        assert_eq!(ms("1y"), Some(31_536_000_000));
    }

    #[test]
    fn nothing_else_is_a_length_of_time() {
        for text in [
            "",
            "s",
            "10ms",
            "1.5s",
            "-5s",
            "5 s",
            "5S",
            "9223372036854775807s",
            "１s",
        ] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
