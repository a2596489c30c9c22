//! How is a number written? Integers as they stand; floats as Python's `repr` writes them.

use std::fmt::Write;

use super::CanonicalError;

/// Appends the canonical form of the number that begins at `at`; returns how many bytes of `text` it takes.
pub(super) fn push(out: &mut String, text: &str, at: usize) -> Result<usize, CanonicalError> {
    let bytes = &text.as_bytes()[at..];
    let digits_from = |from: usize| {
        bytes[from.min(bytes.len())..]
            .iter()
            .take_while(|b| b.is_ascii_digit())
            .count()
    };
    let syntax = |end: usize| CanonicalError::Syntax { at: at + end };

    let start = usize::from(bytes[0] == b'-');
    let whole = digits_from(start);
    if whole == 0 || (whole > 1 && bytes[start] == b'0') {
        return Err(syntax(start));
    }
    let mut end = start + whole;
    let integer_end = end;
    if bytes.get(end) == Some(&b'.') {
        let fraction = digits_from(end + 1);
        if fraction == 0 {
            return Err(syntax(end));
        }
        end += 1 + fraction;
    }
    if matches!(bytes.get(end), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(end + 1), Some(b'+' | b'-')));
        let exponent = digits_from(end + 1 + sign);
        if exponent == 0 {
            return Err(syntax(end));
        }
        end += 1 + sign + exponent;
    }
    let number = &text[at..at + end];
    if end > integer_end {
        let float: f64 = number.parse().map_err(|_| syntax(0))?;
        if float.is_infinite() {
            return Err(CanonicalError::NumberRange { at });
        }
        push_float(out, float);
    } else if number == "-0" {
        out.push('0');
    } else {
        out.push_str(number);
    }
    Ok(end)
}

/// Python's `repr`: the shortest digits that read back as the same double, plain from 1e-4 up to below 1e16.
fn push_float(out: &mut String, float: f64) {
    let shortest = format!("{float:e}");
    let (digits, exponent) = shortest.split_once('e').unwrap_or((&shortest, "0"));
    let fraction = digits.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    if float == 0.0 || (1e-4..1e16).contains(&float.abs()) {
        let shift = exponent.parse().unwrap_or(0_isize);
        let decimals = fraction.saturating_add_signed(-shift).max(1);
        out.push_str(&nearest(float, format!("{float:.decimals$}"), || format!("{float:?}")));
    } else {
        let scientific = nearest(float, format!("{float:.fraction$e}"), || shortest.clone());
        let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
        let (sign, size) = exponent.strip_prefix('-').map_or(('+', exponent), |size| ('-', size));
        // Writing to a string cannot fail.
        let _ = write!(out, "{digits}e{sign}{size:0>2}");
    }
}

/// Of two shortest forms that are equally near, as for ...5.25, Rust takes the upper one and Python the even one. `rounded`,
/// of the same length and rounded to even, is Python's choice, unless it reads back as another double (which it can just
/// above a power of two).
fn nearest(float: f64, rounded: String, shortest: impl FnOnce() -> String) -> String {
    if rounded.parse() == Ok(float) {
        rounded
    } else {
        shortest()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::encode;

    #[test]
    fn floats_look_as_in_python() {
        for (written, canonical) in [
            ("1.0", "1.0"),
            ("-0.0", "-0.0"),
            ("-0", "0"),
            ("-0e5", "-0.0"),
            ("1E2", "100.0"),
            ("1.50", "1.5"),
            ("0.0001", "0.0001"),
            ("0.00001", "1e-05"),
            ("123456789.125e-20", "1.23456789125e-12"),
            ("9999999999999998.0", "9999999999999998.0"),
            ("1e16", "1e+16"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("5e-324", "5e-324"),
            ("1e-400", "0.0"),
            ("0.1e1", "1.0"),
            ("3.141592653589793238", "3.141592653589793"),
            ("1e22", "1e+22"),
            ("-2.5e-7", "-2.5e-07"),
            // Two shortest forms are equally near: the even one counts.
            ("957837846426405.25", "957837846426405.2"),
            ("-711640832826453.25", "-711640832826453.2"),
            ("957837846426405.75", "957837846426405.8"),
            // 2^-44: the nearest form of that length belongs to the double below.
            ("5.684341886080801486968994140625e-14", "5.684341886080802e-14"),
            ("9007199254740994.0", "9007199254740994.0"),
        ] {
            assert_eq!(encode(written).as_deref(), Ok(canonical), "{written}");
        }
    }

    #[test]
    fn integers_keep_every_digit() {
        for text in ["0", "-1", "9007199254740993", "-123456789012345678901234567890"] {
            assert_eq!(encode(text).as_deref(), Ok(text));
        }
    }

    proptest! {
        #[test]
        fn floats_read_back_as_themselves(float in any::<f64>().prop_filter("finite", |float| float.is_finite())) {
            let canonical = encode(&format!("{float:?}")).unwrap();
            prop_assert_eq!(canonical.parse().map(f64::to_bits), Ok(float.to_bits()));
            prop_assert_eq!(encode(&canonical).unwrap(), canonical);
        }
    }
}
