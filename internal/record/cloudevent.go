package record

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// AppendCloudEvent appends an event or a command as structured CloudEvents 1.0 JSON. Data stands in it byte for byte, as
// null where there is none. Of a record's fields ToNode does not travel: the topic says it. What goes in by Check comes
// out of ParseCloudEvent the same. Messages have no such form: their data is published as it is.
//
// It allocates nothing but what dst lacks, and always writes JSON as long as the data is JSON.
func (r *Record) AppendCloudEvent(dst []byte) []byte {
	dst = append(dst, `{"specversion":"1.0","id":"`...)
	dst = strconv.AppendInt(dst, r.LSN, 10)
	dst = append(dst, `","source":"/`...)
	dst = appendText(dst, r.Node)
	dst = append(dst, '/')
	dst = appendText(dst, r.Key.Tenant)
	dst = append(dst, '/')
	dst = appendText(dst, r.Key.Run)
	dst = append(dst, '/')
	dst = appendText(dst, r.Key.Branch)
	dst = appendField(dst, `","type":`, r.Type)
	dst = appendOptional(dst, `,"subject":`, r.Subject)
	dst = AppendTime(append(dst, `,"time":"`...), r.Occurred)
	dst = append(dst, `","datacontenttype":"application/json","sequence":"`...)
	dst = appendDigits(dst, r.LSN, 20)
	dst = append(dst, `","partitionkey":"`...)
	dst = appendText(dst, r.Key.Tenant)
	dst = append(dst, '/')
	dst = appendText(dst, r.Key.Run)
	dst = appendNumber(dst, `","prevlsn":"`, r.PrevLSN)
	dst = appendNumber(dst, `","branchgen":"`, r.Gen)
	dst = appendNumber(dst, `","nodeepoch":"`, r.Epoch)
	dst = appendNumber(dst, `","step":"`, r.Step)
	dst = append(dst, '"')
	dst = appendOptional(dst, `,"correlationid":`, r.Correlation)
	dst = appendOptional(dst, `,"causationid":`, r.Causation)
	dst = appendOptional(dst, `,"traceparent":`, r.Trace)
	dst = AppendTime(append(dst, `,"recordedtime":"`...), r.Recorded)
	dst = append(dst, '"')
	if r.Kind == Command {
		dst = appendField(dst, `,"toagent":`, r.ToAgent)
		dst = appendField(dst, `,"torun":`, r.ToRun)
		dst = appendField(dst, `,"inputid":`, r.InputID)
		dst = append(appendNumber(dst, `,"hops":"`, r.Hops), '"')
		if r.Expires != 0 {
			dst = append(AppendTime(append(dst, `,"expirytime":"`...), r.Expires), '"')
		}
	}
	dst = append(dst, `,"data":`...)
	data := trimSpace(r.Data)
	if len(data) == 0 {
		dst = append(dst, "null"...)
	}
	return append(append(dst, data...), '}')
}

func appendOptional(dst []byte, name, s string) []byte {
	if s == "" {
		return dst
	}
	return appendField(dst, name, s)
}

// Check says what keeps an event or a command from the wire, naming the attribute. What passes survives
// AppendCloudEvent and ParseCloudEvent unchanged, but for ToNode.
func (r *Record) Check() error {
	if r.Kind != Event && r.Kind != Command {
		return fmt.Errorf("kind %d is neither event nor command", r.Kind)
	}
	for _, f := range [...]struct{ name, s string }{
		{"type", r.Type}, {"subject", r.Subject}, {"correlationid", r.Correlation}, {"causationid", r.Causation},
		{"traceparent", r.Trace}, {"inputid", r.InputID},
	} {
		if !utf8.ValidString(f.s) {
			return fmt.Errorf("%s %.40q is not UTF-8", f.name, f.s)
		}
	}
	for _, f := range [...]struct {
		name string
		us   int64
	}{{"time", r.Occurred}, {"recordedtime", r.Recorded}, {"expirytime", r.Expires}} {
		if f.us < minTime || f.us > maxTime {
			return fmt.Errorf("%s is not in the years 0 to 9999", f.name)
		}
	}
	if !utf8.Valid(r.Data) {
		return errors.New("data is not UTF-8")
	}
	if len(r.Data) == 0 || isSpace(r.Data[0]) {
		return errors.New("data has no value at its first byte")
	}
	end, err := skipValue(r.Data, 0)
	if err != nil {
		return fmt.Errorf("data: %w", err)
	}
	if end != len(r.Data) {
		return errors.New("data goes on after its value")
	}
	return r.checkFields()
}

// checkFields is the part of Check that the form of the wire does not already ensure.
func (r *Record) checkFields() error {
	if err := CheckName(r.Node); err != nil {
		return fmt.Errorf("source: node %w", err)
	}
	if err := CheckName(r.Key.Tenant); err != nil {
		return fmt.Errorf("source: tenant %w", err)
	}
	if err := CheckRun(r.Key.Run); err != nil {
		return fmt.Errorf("source: run %w", err)
	}
	if err := CheckBranch(r.Key.Branch); err != nil {
		return fmt.Errorf("source: branch %w", err)
	}
	switch {
	case r.LSN < 1:
		return fmt.Errorf("id %d is not a positive number", r.LSN)
	case r.PrevLSN < 0 || r.PrevLSN >= r.LSN:
		return fmt.Errorf("prevlsn %d is not in 0 to %d, before its own LSN", r.PrevLSN, r.LSN-1)
	case r.Gen < 1:
		return fmt.Errorf("branchgen %d is not a positive number", r.Gen)
	case r.Epoch < 0:
		return fmt.Errorf("nodeepoch %d is negative", r.Epoch)
	case r.Step < 0:
		return fmt.Errorf("step %d is negative", r.Step)
	case r.Type == "":
		return errors.New("type is empty")
	}
	if r.Kind != Command {
		if r.ToAgent != "" || r.ToRun != "" || r.InputID != "" || r.Hops != 0 || r.Expires != 0 {
			return errors.New("an event has attributes of a command")
		}
		return nil
	}
	if err := CheckName(r.ToAgent); err != nil {
		return fmt.Errorf("toagent %w", err)
	}
	if err := CheckName(r.ToRun); err != nil {
		return fmt.Errorf("torun %w", err)
	}
	if r.InputID == "" {
		return errors.New("inputid is empty")
	}
	if r.Hops < 0 {
		return fmt.Errorf("hops %d is negative", r.Hops)
	}
	return nil
}

// attr numbers the attributes that ParseCloudEvent knows.
type attr int

const (
	aSpecversion attr = iota
	aID
	aSource
	aType
	aSubject
	aTime
	aDatacontenttype
	aSequence
	aPartitionkey
	aPrevlsn
	aBranchgen
	aNodeepoch
	aStep
	aCorrelationid
	aCausationid
	aTraceparent
	aRecordedtime
	aToagent
	aTorun
	aInputid
	aHops
	aExpirytime
	aDataBase64
	aData // not in envelope.text
	attrs
)

var attrNames = [attrs]string{
	"specversion", "id", "source", "type", "subject", "time", "datacontenttype", "sequence", "partitionkey", "prevlsn",
	"branchgen", "nodeepoch", "step", "correlationid", "causationid", "traceparent", "recordedtime", "toagent", "torun",
	"inputid", "hops", "expirytime", "data_base64", "data",
}

func attrOf(name []byte) (attr, bool) {
	switch string(name) {
	case "specversion":
		return aSpecversion, true
	case "id":
		return aID, true
	case "source":
		return aSource, true
	case "type":
		return aType, true
	case "subject":
		return aSubject, true
	case "time":
		return aTime, true
	case "datacontenttype":
		return aDatacontenttype, true
	case "sequence":
		return aSequence, true
	case "partitionkey":
		return aPartitionkey, true
	case "prevlsn":
		return aPrevlsn, true
	case "branchgen":
		return aBranchgen, true
	case "nodeepoch":
		return aNodeepoch, true
	case "step":
		return aStep, true
	case "correlationid":
		return aCorrelationid, true
	case "causationid":
		return aCausationid, true
	case "traceparent":
		return aTraceparent, true
	case "recordedtime":
		return aRecordedtime, true
	case "toagent":
		return aToagent, true
	case "torun":
		return aTorun, true
	case "inputid":
		return aInputid, true
	case "hops":
		return aHops, true
	case "expirytime":
		return aExpirytime, true
	case "data_base64":
		return aDataBase64, true
	case "data":
		return aData, true
	}
	return 0, false
}

// ParseCloudEvent reads what AppendCloudEvent writes. Attributes may stand in any order; those it does not know are
// ignored, an attribute that is null is absent, one that is there twice is refused, and so is every form of a number or a
// time but the one that is written. An event is what has no toagent. Errors name the attribute.
//
// Data of the result is the part of b that holds it: b must not be changed while the record is in use.
func ParseCloudEvent(b []byte) (Record, error) {
	var e envelope
	if err := e.scan(b); err != nil {
		return Record{}, fmt.Errorf("parse cloudevent: %w", err)
	}
	r, err := e.record()
	if err != nil {
		return Record{}, fmt.Errorf("parse cloudevent: %w", err)
	}
	return r, nil
}

// envelope is a CloudEvent's top level. A nil text is an absent attribute.
type envelope struct {
	text [aData][]byte
	data []byte
	err  error // the first one of what the methods below record found
}

func (e *envelope) scan(b []byte) error {
	if !utf8.Valid(b) {
		return errors.New("not UTF-8")
	}
	i := skipSpace(b, 0)
	if i >= len(b) || b[i] != '{' {
		return errors.New("not a JSON object")
	}
	var seen uint32
	var others map[string]struct{}
	i = skipSpace(b, i+1)
	for first := true; ; first = false {
		if i < len(b) && b[i] == '}' && first {
			break
		}
		name, end, err := stringAt(b, i)
		if err != nil {
			return fmt.Errorf("attribute name: %w", err)
		}
		if i, err = skipColon(b, end); err != nil {
			return fmt.Errorf("after attribute %.40q: %w", name, err)
		}
		i = skipSpace(b, i)

		a, known := attrOf(name)
		_, twice := others[string(name)]
		if twice || known && seen&(1<<a) != 0 {
			return fmt.Errorf("attribute %.40q is there twice", name)
		}
		switch {
		case !known:
			if others == nil {
				others = make(map[string]struct{})
			}
			others[string(name)] = struct{}{}
			end, err = skipValue(b, i)
		case a == aData:
			if end, err = skipValue(b, i); err == nil {
				e.data = b[i:end:end]
			}
		case i < len(b) && b[i] == 'n':
			end, err = skipWord(b, i, "null")
		default:
			e.text[a], end, err = stringAt(b, i)
		}
		if err != nil {
			return fmt.Errorf("%.40s: %w", name, err)
		}
		if known {
			seen |= 1 << a
		}

		i = skipSpace(b, end)
		if i >= len(b) {
			return errEnd
		}
		if b[i] == '}' {
			break
		}
		if b[i] != ',' {
			return unexpected(b, i)
		}
		i = skipSpace(b, i+1)
	}
	if i = skipSpace(b, i+1); i != len(b) {
		return fmt.Errorf("goes on after its object: %w", unexpected(b, i))
	}
	return nil
}

// stringAt gives the text of the string at b[i], never nil, and the index after it.
func stringAt(b []byte, i int) (text []byte, end int, err error) {
	if i < len(b) && b[i] != '"' {
		return nil, 0, fmt.Errorf("not a string: %w", unexpected(b, i))
	}
	end, escaped, err := skipString(b, i)
	if err != nil {
		return nil, 0, err
	}
	text = b[i+1 : end-1]
	if escaped {
		text, err = unescape(text)
	}
	return text, end, err
}

// record makes the record of an envelope that scan has passed.
func (e *envelope) record() (Record, error) {
	if v := e.required(aSpecversion); e.err == nil && string(v) != "1.0" {
		e.fail(aSpecversion, v, "is not 1.0")
	}
	if v := e.text[aDatacontenttype]; v != nil && string(v) != "application/json" {
		e.fail(aDatacontenttype, v, "is not application/json")
	}
	if e.text[aDataBase64] != nil {
		e.fail(aDataBase64, nil, "is not for JSON data")
	}
	r := Record{
		Kind:        Event,
		LSN:         e.number(aID),
		Type:        string(e.required(aType)),
		Subject:     e.optional(aSubject),
		Occurred:    e.time(aTime),
		PrevLSN:     e.number(aPrevlsn),
		Gen:         e.number(aBranchgen),
		Epoch:       e.number(aNodeepoch),
		Step:        e.number(aStep),
		Correlation: e.optional(aCorrelationid),
		Causation:   e.optional(aCausationid),
		Trace:       e.optional(aTraceparent),
		Recorded:    e.time(aRecordedtime),
		Data:        e.data,
	}
	var ok bool
	source := string(e.required(aSource))
	if r.Node, r.Key, ok = splitSource(source); !ok {
		e.fail(aSource, e.text[aSource], "is not /<node>/<tenant>/<run>/<branch>")
	}
	// 20 digits hold every id, so the sequence must be the id after zeros.
	id, seq := e.text[aID], e.required(aSequence)
	if len(seq) != 20 || !bytes.HasSuffix(seq, id) || len(bytes.TrimLeft(seq[:20-len(id)], "0")) != 0 {
		e.fail(aSequence, seq, "is not the id in 20 digits")
	}
	if v := e.required(aPartitionkey); e.err == nil {
		// <tenant>/<run> is what stands in the source between the node and the branch.
		if key := source[2+len(r.Node) : len(source)-1-len(r.Key.Branch)]; string(v) != key {
			e.fail(aPartitionkey, v, "is not the tenant and run of the source")
		}
	}
	if e.data == nil {
		e.fail(aData, nil, "is missing")
	}
	if e.text[aToagent] != nil {
		r.Kind = Command
		r.ToAgent = string(e.required(aToagent))
		r.ToRun = string(e.required(aTorun))
		r.InputID = string(e.required(aInputid))
		r.Hops = e.number(aHops)
		if e.text[aExpirytime] != nil {
			if r.Expires = e.time(aExpirytime); r.Expires == 0 {
				e.fail(aExpirytime, e.text[aExpirytime], "would mean never")
			}
		}
	} else {
		for _, a := range [...]attr{aTorun, aInputid, aHops, aExpirytime} {
			if e.text[a] != nil {
				e.fail(a, nil, "is there without toagent")
			}
		}
	}
	if e.err != nil {
		return Record{}, e.err
	}
	return r, r.checkFields()
}

func splitSource(s string) (node string, key BranchKey, ok bool) {
	rest, ok1 := strings.CutPrefix(s, "/")
	node, rest, ok2 := strings.Cut(rest, "/")
	tenant, rest, ok3 := strings.Cut(rest, "/")
	run, branch, ok4 := strings.Cut(rest, "/")
	return node, BranchKey{Tenant: tenant, Run: run, Branch: branch}, ok1 && ok2 && ok3 && ok4
}

func (e *envelope) fail(a attr, v []byte, what string) {
	switch {
	case e.err != nil:
	case v == nil:
		e.err = fmt.Errorf("%s %s", attrNames[a], what)
	default:
		e.err = fmt.Errorf("%s %.40q %s", attrNames[a], v, what)
	}
}

func (e *envelope) required(a attr) []byte {
	v := e.text[a]
	if v == nil {
		e.fail(a, nil, "is missing")
	} else if len(v) == 0 {
		e.fail(a, nil, "is empty")
	}
	return v
}

func (e *envelope) optional(a attr) string {
	v := e.text[a]
	if v != nil && len(v) == 0 {
		e.fail(a, nil, "is empty")
	}
	return string(v)
}

func (e *envelope) number(a attr) int64 {
	v := e.required(a)
	n, ok := parseDecimal(v)
	if !ok {
		e.fail(a, v, "is not a decimal number without leading zeros")
	}
	return n
}

func (e *envelope) time(a attr) int64 {
	v := e.required(a)
	us, ok := parseTime(v)
	if !ok {
		e.fail(a, v, "is not a time such as 2006-01-02T15:04:05.000000Z")
	}
	return us
}
