package record

import (
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// maxDepth is how deep the arrays and objects of a value may nest: what encoding/json allows for a value that stands
// alone. Data is held to it by itself, not with the envelope around it, or data that was accepted at the door could not
// travel. TestDataSurvives.
const maxDepth = 10_000

var (
	errEnd  = errors.New("ends in the middle")
	errDeep = fmt.Errorf("nests deeper than %d", maxDepth)
)

// skipValue returns the index after the JSON value that starts at b[i]. It accepts exactly what encoding/json's Valid
// accepts; UTF-8 is the caller's to check. FuzzSkipValue.
func skipValue(b []byte, i int) (int, error) {
	var room [64]byte
	open := room[:0] // the closing byte of each array and object that is open
	var err error
	for {
		i = skipSpace(b, i)
		if i >= len(b) {
			return 0, errEnd
		}
		switch c := b[i]; c {
		case '{', '[':
			if len(open) == maxDepth {
				return 0, errDeep
			}
			open = append(open, c+2) // in ASCII, } and ] follow { and [ by two
			i = skipSpace(b, i+1)
			if i < len(b) && b[i] == c+2 {
				open = open[:len(open)-1]
				i++
				break
			}
			if c == '{' {
				i, err = skipName(b, i)
			}
			if err != nil {
				return 0, err
			}
			continue
		case '"':
			i, _, err = skipString(b, i)
		case '-', '0', '1', '2', '3', '4', '5', '6', '7', '8', '9':
			i, err = skipNumber(b, i)
		case 't':
			i, err = skipWord(b, i, "true")
		case 'f':
			i, err = skipWord(b, i, "false")
		case 'n':
			i, err = skipWord(b, i, "null")
		default:
			err = unexpected(b, i)
		}
		if err != nil {
			return 0, err
		}
		for { // after a value
			if len(open) == 0 {
				return i, nil
			}
			i = skipSpace(b, i)
			if i >= len(b) {
				return 0, errEnd
			}
			end := open[len(open)-1]
			if b[i] == end {
				open = open[:len(open)-1]
				i++
				continue
			}
			if b[i] != ',' {
				return 0, unexpected(b, i)
			}
			i++
			if end == '}' {
				if i, err = skipName(b, skipSpace(b, i)); err != nil {
					return 0, err
				}
			}
			break
		}
	}
}

// skipName returns the index after the name at b[i] and its colon.
func skipName(b []byte, i int) (int, error) {
	i, _, err := skipString(b, i)
	if err != nil {
		return 0, err
	}
	return skipColon(b, i)
}

func skipColon(b []byte, i int) (int, error) {
	i = skipSpace(b, i)
	if i >= len(b) {
		return 0, errEnd
	}
	if b[i] != ':' {
		return 0, unexpected(b, i)
	}
	return i + 1, nil
}

// skipString returns the index after the string at b[i], and whether it has escapes.
func skipString(b []byte, i int) (end int, escaped bool, err error) {
	if i >= len(b) {
		return 0, false, errEnd
	}
	if b[i] != '"' {
		return 0, false, unexpected(b, i)
	}
	for i++; i < len(b); i++ {
		c := b[i]
		if c == '"' {
			return i + 1, escaped, nil
		}
		if c < 0x20 {
			return 0, false, unexpected(b, i)
		}
		if c != '\\' {
			continue
		}
		escaped = true
		i++
		if i >= len(b) {
			break
		}
		switch b[i] {
		case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		case 'u':
			if _, ok := hex4(b, i+1); !ok {
				return 0, false, unexpected(b, i)
			}
			i += 4
		default:
			return 0, false, unexpected(b, i)
		}
	}
	return 0, false, errEnd
}

func skipNumber(b []byte, i int) (int, error) {
	if b[i] == '-' {
		i++
	}
	start := i
	i = skipDigits(b, i)
	if i == start || b[start] == '0' && i > start+1 {
		return 0, unexpected(b, start)
	}
	if i < len(b) && b[i] == '.' {
		start = i + 1
		if i = skipDigits(b, start); i == start {
			return 0, unexpected(b, start)
		}
	}
	if i < len(b) && (b[i] == 'e' || b[i] == 'E') {
		i++
		if i < len(b) && (b[i] == '+' || b[i] == '-') {
			i++
		}
		start = i
		if i = skipDigits(b, start); i == start {
			return 0, unexpected(b, start)
		}
	}
	return i, nil
}

func skipDigits(b []byte, i int) int {
	for i < len(b) && '0' <= b[i] && b[i] <= '9' {
		i++
	}
	return i
}

func skipWord(b []byte, i int, word string) (int, error) {
	if len(b)-i < len(word) || string(b[i:i+len(word)]) != word {
		return 0, unexpected(b, i)
	}
	return i + len(word), nil
}

func skipSpace(b []byte, i int) int {
	for i < len(b) && isSpace(b[i]) {
		i++
	}
	return i
}

func isSpace(c byte) bool { return c == ' ' || c == '\n' || c == '\t' || c == '\r' }

func unexpected(b []byte, i int) error {
	if i >= len(b) {
		return errEnd
	}
	return fmt.Errorf("unexpected %q at byte %d", b[i], i)
}

// trimSpace cuts what JSON calls whitespace around a value: data is what is between its first and its last byte.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && isSpace(b[0]) {
		b = b[1:]
	}
	for len(b) > 0 && isSpace(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	return b
}

// unescape resolves the escapes of a string's inside, which skipString has passed. Half a surrogate pair is an error: it
// is no text, and a replacement character in its place would make two different strings one.
func unescape(b []byte) ([]byte, error) {
	out := make([]byte, 0, len(b))
	for i := 0; i < len(b); i++ {
		if b[i] != '\\' {
			out = append(out, b[i])
			continue
		}
		i++
		switch c := b[i]; c {
		case 'b':
			out = append(out, '\b')
		case 'f':
			out = append(out, '\f')
		case 'n':
			out = append(out, '\n')
		case 'r':
			out = append(out, '\r')
		case 't':
			out = append(out, '\t')
		case 'u':
			r, _ := hex4(b, i+1)
			i += 4
			if utf16.IsSurrogate(r) {
				var low rune
				if i+2 < len(b) && b[i+1] == '\\' && b[i+2] == 'u' {
					low, _ = hex4(b, i+3)
				}
				if r = utf16.DecodeRune(r, low); r == utf8.RuneError {
					return nil, errors.New("has half a surrogate pair")
				}
				i += 6
			}
			out = utf8.AppendRune(out, r)
		default:
			out = append(out, c)
		}
	}
	return out, nil
}

func hex4(b []byte, i int) (rune, bool) {
	if len(b)-i < 4 {
		return 0, false
	}
	var r rune
	for _, c := range b[i : i+4] {
		switch {
		case '0' <= c && c <= '9':
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return 0, false
		}
		r = r<<4 | rune(c)
	}
	return r, true
}

// appendText appends the inside of a JSON string. Only what JSON demands is escaped; what is not UTF-8 becomes U+FFFD, so
// that the result is JSON whatever s is.
func appendText(dst []byte, s string) []byte {
	const digits = "0123456789abcdef"
	start := 0
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			r, size := utf8.DecodeRuneInString(s[i:])
			if r == utf8.RuneError && size == 1 {
				dst = append(append(dst, s[start:i]...), "\ufffd"...)
				start = i + 1
			}
			i += size
			continue
		}
		if c >= 0x20 && c != '"' && c != '\\' {
			i++
			continue
		}
		dst = append(dst, s[start:i]...)
		switch c {
		case '"', '\\':
			dst = append(dst, '\\', c)
		case '\n':
			dst = append(dst, `\n`...)
		case '\r':
			dst = append(dst, `\r`...)
		case '\t':
			dst = append(dst, `\t`...)
		default:
			dst = append(dst, '\\', 'u', '0', '0', digits[c>>4], digits[c&15])
		}
		i++
		start = i
	}
	return append(dst, s[start:]...)
}

// appendField appends a name as it stands in the code, with its comma and colon, and s as a JSON string.
func appendField(dst []byte, name, s string) []byte {
	dst = append(append(dst, name...), '"')
	return append(appendText(dst, s), '"')
}

// appendNumber is appendField for a number.
func appendNumber(dst []byte, name string, n int64) []byte {
	return strconv.AppendInt(append(dst, name...), n, 10)
}

// The first and the last microsecond that the wire's time has a form for: the years 0 to 9999.
var (
	minTime = time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro()
	maxTime = time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC).UnixMicro() - 1
)

// AppendTime appends microseconds since 1970 as RFC 3339 in UTC with six decimals, the one form of times on the wire. A time
// outside of the years 0 to 9999 has no such form and becomes the first or the last that has one.
func AppendTime(dst []byte, us int64) []byte {
	t := time.UnixMicro(min(max(us, minTime), maxTime)).UTC()
	year, month, day := t.Date()
	hour, minute, second := t.Clock()
	dst = appendDigits(dst, int64(year), 4)
	dst = appendDigits(append(dst, '-'), int64(month), 2)
	dst = appendDigits(append(dst, '-'), int64(day), 2)
	dst = appendDigits(append(dst, 'T'), int64(hour), 2)
	dst = appendDigits(append(dst, ':'), int64(minute), 2)
	dst = appendDigits(append(dst, ':'), int64(second), 2)
	dst = appendDigits(append(dst, '.'), int64(t.Nanosecond()/1000), 6)
	return append(dst, 'Z')
}

// appendDigits appends the last width decimal digits of n.
func appendDigits(dst []byte, n int64, width int) []byte {
	dst = append(dst, "00000000000000000000"[:width]...)
	for i := len(dst) - 1; n > 0 && width > 0; i, width = i-1, width-1 {
		dst[i] = byte('0' + n%10)
		n /= 10
	}
	return dst
}

// parseTime reads exactly what AppendTime writes.
func parseTime(b []byte) (int64, bool) {
	const form = "0000-00-00T00:00:00.000000Z"
	if len(b) != len(form) {
		return 0, false
	}
	var n [7]int
	field := 0
	for i := range len(form) {
		if form[i] != '0' {
			if b[i] != form[i] {
				return 0, false
			}
			field++
			continue
		}
		if b[i] < '0' || b[i] > '9' {
			return 0, false
		}
		n[field] = n[field]*10 + int(b[i]-'0')
	}
	if n[1] < 1 || n[1] > 12 || n[2] < 1 || n[3] > 23 || n[4] > 59 || n[5] > 59 {
		return 0, false
	}
	t := time.Date(n[0], time.Month(n[1]), n[2], n[3], n[4], n[5], n[6]*1000, time.UTC)
	if t.Day() != n[2] { // such as 30 February
		return 0, false
	}
	return t.UnixMicro(), true
}

// parseDecimal reads a number without sign and leading zeros.
func parseDecimal(b []byte) (int64, bool) {
	if len(b) == 0 || len(b) > 19 || b[0] == '0' && len(b) > 1 {
		return 0, false
	}
	var n uint64
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + uint64(c-'0')
	}
	return int64(n), n <= 1<<63-1
}
