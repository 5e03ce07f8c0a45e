"A prompt for judges other than xVerify."

JUDGE_TEMPLATE = '''\
Does the given answer say the same as the reference answer? Notation may differ, the meaning may not.

Question: {question}

Given answer: {output}

Reference answer: {answer}

Reply with a single word, Correct or Incorrect.'''
