package record

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// NodeRun is the reserved run that carries a tenant's handed-over inputs. No name can be equal to it.
const NodeRun = "~node"

// maxTopic is what the two length bytes of an MQTT string can say.
const maxTopic = 65535

// maxRoot leaves room below maxTopic for the longest topic under a root: six names and the words between them.
const maxRoot = 1024

// CheckName says what is wrong with the name of a tenant, run, agent, node or fold: 1 to 64 of A-Z, a-z, 0-9, _ and -.
// Names stand in topics, in sources and between slashes, unescaped.
func CheckName(s string) error {
	if s == "" {
		return errors.New("is empty")
	}
	if len(s) > 64 {
		return fmt.Errorf("%.20q… is longer than 64 bytes", s)
	}
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '_', c == '-':
		default:
			return fmt.Errorf("%q has a character other than A-Z, a-z, 0-9, _ and -", s)
		}
	}
	return nil
}

// CheckRun is CheckName for the run of a record: NodeRun is allowed too.
func CheckRun(s string) error {
	if s == NodeRun {
		return nil
	}
	return CheckName(s)
}

// CheckBranch says what is wrong with a branch: 26 characters of Crockford's base 32 in upper case, not above 128 bits.
// One form only, because branches are compared as text.
func CheckBranch(s string) error {
	if len(s) != 26 {
		return fmt.Errorf("%.30q is not a ULID: it has %d characters, not 26", s, len(s))
	}
	if s[0] > '7' {
		return fmt.Errorf("%q is not a ULID: it is above 128 bits", s)
	}
	for i := range len(s) {
		switch c := s[i]; {
		case '0' <= c && c <= '9', 'A' <= c && c <= 'Z' && c != 'I' && c != 'L' && c != 'O' && c != 'U':
		default:
			return fmt.Errorf("%q is not a ULID: character %d is not of 0-9 and A-Z without I, L, O and U", s, i+1)
		}
	}
	return nil
}

// CheckText says what is wrong with a string that becomes a CloudEvents attribute (type, subject, input id, correlation):
// CloudEvents allows no control characters and no noncharacters. The codec carries them all the same, so that a record
// once committed can always travel; this check belongs before the commit.
func CheckText(s string) error {
	if !utf8.ValidString(s) {
		return fmt.Errorf("%.40q is not UTF-8", s)
	}
	for _, c := range s {
		if isControl(c) {
			return fmt.Errorf("%.40q has the control character %U", s, c)
		}
		if isNonCharacter(c) {
			return fmt.Errorf("%.40q has the noncharacter %U", s, c)
		}
	}
	return nil
}

// CheckRoot says what is wrong with the root of all topics: 1 to 1024 bytes of CheckText's characters, no wildcard, no
// empty level, not starting with $.
func CheckRoot(s string) error {
	if s == "" {
		return errors.New("is empty")
	}
	if len(s) > maxRoot {
		return fmt.Errorf("%.40q… is longer than %d bytes", s, maxRoot)
	}
	if err := checkTopicText(s); err != nil {
		return err
	}
	if strings.HasPrefix(s, "/") || strings.HasSuffix(s, "/") || strings.Contains(s, "//") {
		return fmt.Errorf("%q has an empty level", s)
	}
	return nil
}

// checkTopicText holds for every topic that is published to. A broker may cut the connection over any of these, and the
// record would be poison.
func checkTopicText(s string) error {
	if err := CheckText(s); err != nil {
		return err
	}
	if strings.ContainsAny(s, "+#") {
		return fmt.Errorf("%.40q has a wildcard", s)
	}
	if s[0] == '$' {
		return fmt.Errorf("%.40q starts with $", s)
	}
	return nil
}

func isControl(c rune) bool { return c < 0x20 || 0x7f <= c && c <= 0x9f }

func isNonCharacter(c rune) bool { return c&0xfffe == 0xfffe || 0xfdd0 <= c && c <= 0xfdef }
