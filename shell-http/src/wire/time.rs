//! RFC 3339, UTC, milliseconds; inside, the store's microseconds.

use jiff::Timestamp;
use jiff::fmt::StdIoWrite;
use jiff::fmt::temporal::DateTimePrinter;
use leasehold_core::store::{Clock, SCORE_MAX};

/// What [`parse`] reads.
pub const WANTED: &str =
    "must be a time as in RFC 3339, as 2030-01-31T12:00:00Z, and not after 2255-06-05T23:47:34.740Z";

const PRINTER: DateTimePrinter = DateTimePrinter::new().precision(Some(3));

/// Writes the time in quotes. Microseconds are cut off.
pub fn write(out: &mut Vec<u8>, clock: Clock) {
    out.push(b'"');
    let micros = i64::try_from(clock.min(SCORE_MAX)).unwrap_or_default();
    if let Ok(timestamp) = Timestamp::from_microsecond(micros) {
        // Writing to a vector cannot fail.
        let _ = PRINTER.print_timestamp(&timestamp, StdIoWrite(&mut *out));
    }
    out.push(b'"');
}

/// Reads a time; one before 1970 counts as 1970, one after June 2255 is none.
pub fn parse(text: &str) -> Option<Clock> {
    let timestamp: Timestamp = text.parse().ok()?;
    Some(u64::try_from(timestamp.as_microsecond()).unwrap_or(0)).filter(|clock| *clock <= SCORE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(clock: Clock) -> String {
        let mut out = Vec::new();
        write(&mut out, clock);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn there_and_back() {
        assert_eq!(text(0), "\"1970-01-01T00:00:00.000Z\"");
        assert_eq!(text(1_700_000_000_999_999), "\"2023-11-14T22:13:20.999Z\"");
        assert!(text(u64::MAX).starts_with("\"2255-"));
        assert_eq!(parse("2023-11-14T22:13:20.999Z"), Some(1_700_000_000_999_000));
        assert_eq!(parse("2023-11-14T23:13:20.999+01:00"), Some(1_700_000_000_999_000));
        assert_eq!(parse("2023-11-14T22:13:20Z"), Some(1_700_000_000_000_000));
        assert_eq!(parse("1969-01-01T00:00:00Z"), Some(0));
        for bad in [
            "",
            "now",
            "2023-11-14",
            "2023-11-14T22:13:20",
            "2023-13-14T22:13:20Z",
            "1700000000",
            "2999-01-01T00:00:00Z",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
        let last = text(SCORE_MAX);
        assert!(WANTED.contains(last.trim_matches('"')), "{last}");
        assert!(parse(last.trim_matches('"')).is_some());
    }
}
